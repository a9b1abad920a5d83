"""What a test needs beside Python: without it the test is skipped on a user's machine and fails in CI."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

TOOLS = Path(sys.prefix) / "tools"
"""Where `make test` puts programs that pip can bring: beside the virtual environment's own."""


def require(present: object, reason: str) -> None:
    """Goes on when `present` is true; else skips for `reason`, or fails where CI is set. Also at a module's top."""
    if present:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{reason} In CI nothing may be missing.", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def require_program(name: str, install: str) -> Path:
    """Where the program is; `install` says how to get it, as a sentence's end: 'apt-get install NAME'."""
    beside_python = Path(sys.executable).parent
    found = shutil.which(name, path=os.pathsep.join([str(TOOLS), str(beside_python), os.environ.get("PATH", "")]))
    require(found, f"{name} is not installed: {install}.")
    return Path(str(found))


def require_module(name: str, install: str) -> None:
    """Goes on when Python finds the module; `install` says how to get it."""
    require(importlib.util.find_spec(name), f"The Python package {name} is not installed: {install}.")
