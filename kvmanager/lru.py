"""Least recently released first: the order that every other policy is compared with."""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush

from kvmanager.policy import EvictionPolicy

_HELD = -1


class Lru(EvictionPolicy):
    """A heap of stamps, one stamp per release; entries of blocks that left the offer are skipped when they surface.

    All blocks of a release share a stamp: the books offer the end of a chain before its beginning.
    """

    __slots__ = ("_heap", "_now", "_num_blocks", "_on_offer", "_stamps")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._stamps = array("q", [0]) * num_blocks
        self._on_offer = array("q", [_HELD]) * num_blocks
        """The heap entry of each block on offer."""
        self._heap: list[int] = []
        self._now = 0

    def store(self, block: int, name: bytes, depth: int) -> None:
        pass

    def hit(self, blocks: list[int]) -> None:
        for block in blocks:
            self._on_offer[block] = _HELD

    def release(self, blocks: list[int]) -> None:
        self._now += 1
        for block in blocks:
            self._stamps[block] = self._now

    def add(self, block: int) -> None:
        if len(self._heap) > 2 * self._num_blocks:
            self._heap = [entry for entry in self._on_offer if entry != _HELD]
            heapify(self._heap)
        entry = self._stamps[block] * self._num_blocks + block
        self._on_offer[block] = entry
        heappush(self._heap, entry)

    def victim(self) -> int:
        while True:
            entry = heappop(self._heap)
            block = entry % self._num_blocks
            if self._on_offer[block] == entry:
                self._on_offer[block] = _HELD
                return block

    def evicted(self, block: int, name: bytes) -> None:
        pass

    def forget(self, block: int) -> None:
        self._on_offer[block] = _HELD
