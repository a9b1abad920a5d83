"""Compiles the books with mypyc when OCTAVO_COMPILE=1 is set at installation; everything else is in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup

SOURCES = sorted(str(path) for path in Path("kvmanager").glob("*.py"))


def extensions() -> list:
    if os.environ.get("OCTAVO_COMPILE") != "1":
        return []
    from mypyc.build import mypycify

    return mypycify(["--strict", *SOURCES], opt_level="3", debug_level="0")


setup(ext_modules=extensions())
