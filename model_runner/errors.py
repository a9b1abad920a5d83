"""What the model runner raises before it can serve."""

from __future__ import annotations


class ModelLoadError(Exception):
    """One sentence that names the file and says what is wrong with it."""
