"""Reading a model's JSON files, with every way to fail as one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from model_runner.errors import ModelLoadError


def read_text(path: Path) -> str:
    """The file as UTF-8 text. Raises ModelLoadError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist.") from None
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is not UTF-8 text: byte {error.start} is wrong.") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file. Raises ModelLoadError, also for other JSON values."""
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}.") from None
    except RecursionError:
        raise ModelLoadError(f"{path} is not valid JSON: it is nested too deeply.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__} where an object is expected.")
    return value
