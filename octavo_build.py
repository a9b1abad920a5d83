"""setuptools as the build backend, with mypyc and what it needs to read when the books are to be compiled."""

from __future__ import annotations

import os
from collections.abc import Callable

from setuptools.build_meta import *  # noqa: F403 - a backend is its module's names
from setuptools.build_meta import get_requires_for_build_editable as _for_editable
from setuptools.build_meta import get_requires_for_build_wheel as _for_wheel

COMPILE = "OCTAVO_COMPILE"

# The libraries are for mypy, which reads their types.
COMPILER = ["mypy>=1.15", "cbor2>=5.6", "xxhash>=3.4"]


def get_requires_for_build_wheel(config_settings=None):
    return _requires(_for_wheel, config_settings)


def get_requires_for_build_editable(config_settings=None):
    return _requires(_for_editable, config_settings)


def _requires(ask: Callable, config_settings) -> list[str]:
    """setuptools runs setup.py to answer, when there is no compiler yet."""
    wanted = os.environ.pop(COMPILE, "")
    try:
        needed = ask(config_settings)
    finally:
        if wanted:
            os.environ[COMPILE] = wanted
    return needed + (COMPILER if wanted == "1" else [])
