"""Typed access to a model's settings: what is missing or of another type is told in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_runner.errors import ModelLoadError


class Fields:
    """Settings by key; None counts as absent. `path` is the file to name in errors."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def count(self, key: str, default: int | None = None) -> int:
        """An integer of at least 1. Without a default the key must be there. Raises ModelLoadError, as all here do."""
        value = self._given(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number of at least 1")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._given(key, default)
        # Compared with the largest float and not with infinity: an integer may be finite and larger.
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._given(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there, be it with None."""
        return key in self._values

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Token ids given as none, one or a list."""
        value = self.get(key)
        if not isinstance(value, list):
            value = [] if value is None else [value]
        if not all(_is_token_id(each) for each in value):
            raise self.wrong(key, "a token id or a list of them")
        return tuple(value)

    def token_id(self, key: str) -> int | None:
        """A token id, or None when there is none."""
        value = self.get(key)
        if value is not None and not _is_token_id(value):
            raise self.wrong(key, "a token id")
        return value

    def object(self, key: str) -> Fields | None:
        """Settings inside the settings, or None when there are none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return Fields(self.path, value)

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {key} is {self.get(key)!r:.80}, and should be {expected}.")

    def _given(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelLoadError(f"{self.path}: {key} is missing.")
        return default


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
