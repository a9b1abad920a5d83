"""Blocks that may be given up, ordered by priority and rank: a heap."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

_BLOCK_BITS: Final = 24
_BLOCK_MASK: Final = (1 << _BLOCK_BITS) - 1
_RANK_BITS: Final = 64
_SLACK: Final = 64


class Victims:
    """Candidates by (priority, rank), the least first. Each verb is O(log candidates), amortised.

    An entry is one number: priority, rank and block. What is retracted stays in the heap until it comes up or until
    the heap is mostly such; `_entries` says which entries still count.
    """

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._heap: list[int] = []

    def offer(self, block: int, priority: int, rank: int) -> None:
        """`block` may be given up from now on."""
        entry = ((priority << _RANK_BITS | rank) << _BLOCK_BITS) | block
        self._entries[block] = entry
        heappush(self._heap, entry)

    def retract(self, block: int) -> None:
        """`block` may be given up no more, if it could be before."""
        if self._entries.pop(block, 0) and len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def first(self) -> int:
        """The block to give up first; 0 when there is none."""
        while self._entries:
            block = self._heap[0] & _BLOCK_MASK
            if self._entries.get(block) == self._heap[0]:
                return block
            heappop(self._heap)
        return 0

    def pop(self) -> int:
        """Takes the block to give up first; 0 when there is none."""
        block = self.first()
        if block:
            del self._entries[block]
            heappop(self._heap)
        return block

    def members(self) -> list[int]:
        """The candidates, in no order."""
        return list(self._entries)
