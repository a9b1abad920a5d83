"""The clock of a pool: it is handed in, so that the books have no time of their own."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds that only grow."""


def no_time() -> float:
    """The clock of a pool that is given none: it stands still."""
    return 0.0
