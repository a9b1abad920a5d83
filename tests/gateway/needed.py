"""Packages that the tests of this folder need."""

from __future__ import annotations

from tests.required import require_module


def need(*modules: str) -> None:
    """Goes on when Python finds them all; else the file that calls it is skipped, and in CI fails."""
    for name in modules:
        require_module(name, "pip install 'octavo[gateway,dev]'")
