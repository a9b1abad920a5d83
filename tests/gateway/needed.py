"""Packages that the tests of this folder need: without one they are skipped, but not where all of them must run."""

from __future__ import annotations

import importlib
import os

import pytest


def need(*modules: str) -> None:
    """Skips the file that calls it when a module is missing; in CI, fails."""
    for name in modules:
        if os.environ.get("CI"):
            importlib.import_module(name)
        else:
            pytest.importorskip(name, reason=f"{name} is not installed: pip install 'octavo[gateway,dev]'")
