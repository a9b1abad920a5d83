"""How much of what was asked lately was found: sums over the most recent lookups."""

from __future__ import annotations

from collections import deque
from typing import Final

from kvmanager.types import RecentLookups

WINDOW: Final = 1000
"""Lookups of a pool's window, as many as vLLM's."""


class HitWindow:
    """Adding costs as good as nothing, for it only notes; the sums are made when they are asked for, in O(window)."""

    __slots__ = ("_notes", "_requests")

    def __init__(self, requests: int = WINDOW) -> None:
        self._requests = requests
        # Each note is of at least one request, so that these reach back as far as the window ever does.
        self._notes: deque[tuple[int, int, int]] = deque(maxlen=requests)

    def add(self, requests: int, queries: int, hits: int) -> None:
        """So many requests asked for `queries` tokens and found `hits`; no requests change nothing."""
        if requests:
            self._notes.append((requests, queries, hits))

    def sums(self) -> RecentLookups:
        """Over the newest note and those before it, as long as they are no more requests than the window has."""
        lookups = queried = hit = 0
        for requests, queries, hits in reversed(self._notes):
            if lookups and lookups + requests > self._requests:
                break
            lookups += requests
            queried += queries
            hit += hits
        return RecentLookups(lookups, queried, hit)

    @property
    def rate(self) -> float | None:
        """The share of the tokens asked for that was found, 0 to 1; None when none was asked for."""
        sums = self.sums()
        return sums.hit_tokens / sums.queried_tokens if sums.queried_tokens else None
