"""Blocks that may not be given up before a time: a pin always covers a chain from its first block on."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

_SLACK: Final = 64


class Pins:
    """until: the end of each block's pin, in seconds of the pool's clock. idle: pinned blocks that are cached."""

    __slots__ = ("_ends", "idle", "until")

    def __init__(self) -> None:
        self.until: dict[int, float] = {}
        self.idle = 0
        self._ends: list[tuple[float, int]] = []

    def pin(self, block: int, until: float) -> None:
        """Keeps a held block until then, or longer when it is pinned for longer already."""
        if until > self.until.get(block, 0.0):
            self.until[block] = until
            heappush(self._ends, (until, block))
            if len(self._ends) > 2 * len(self.until) + _SLACK:
                self._ends = [(end, pinned) for pinned, end in self.until.items()]
                heapify(self._ends)

    def unpin(self, block: int) -> None:
        """Forgets the pin of a block, if it has one."""
        self.until.pop(block, None)

    def expire(self, now: float) -> list[int]:
        """Takes the pins that have run out."""
        ended: list[int] = []
        while self._ends and self._ends[0][0] <= now:
            until, block = heappop(self._ends)
            if self.until.get(block) == until:
                del self.until[block]
                ended.append(block)
        return ended

    def clear(self) -> None:
        """Forgets every pin."""
        self.until.clear()
        self._ends.clear()
        self.idle = 0
