"""What options of `octavo generate` read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.errors import StartupError


def read_text(path: Path | None) -> str | None:
    """The file's text. Raises StartupError with a sentence for one that cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text()
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise StartupError(f"{path} is no text in UTF-8.") from None


def read_schema(given: str | None) -> str | None:
    """A JSON schema, or the text of the file that has one. Raises StartupError."""
    return given if given is None or given.lstrip().startswith("{") else read_text(Path(given))


def read_tools(path: Path | None) -> list[Any]:
    """The tools in a file. Raises StartupError."""
    text = read_text(path)
    if text is None:
        return []
    try:
        tools = json.loads(text)
    except ValueError as error:
        raise StartupError(f"{path} is no JSON: {error}.") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise StartupError(f"{path} must have a JSON list of tools, each of them an object.")
    return tools
