"""The YAML file with settings."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from services.errors import StartupError


def read_config_file(path: Path, known: frozenset[str]) -> dict[str, Any]:
    """The settings in the file. Raises StartupError: unreadable, no mapping, or a key that is not `known`."""
    loaded = _load(path)
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise StartupError(f"The settings file {path} must hold a mapping of settings to values.")
    for key in loaded:
        if key not in known:
            raise StartupError(f"The settings file {path} has an unknown setting {key!r}{_suggestion(key, known)}.")
    return loaded


def _load(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"Cannot read the settings file {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"The settings file {path} is no valid YAML{line_of(error)}.") from None


def line_of(error: Exception) -> str:
    """Where YAML is wrong, for the end of a sentence; the parser's own words quote the file."""
    where = getattr(error, "problem_mark", None)
    return f" (line {where.line + 1})" if where is not None else ""


def _suggestion(key: object, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(str(key).replace("-", "_"), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
