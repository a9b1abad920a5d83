"""Which cached block to give up: a policy behind four verbs, and LRU, the first of them.

Callers release the blocks of a sequence last first, so that under LRU a block always outlives those that follow it
in its chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

_NOWHERE = -1


class EvictionPolicy(Protocol):
    """An order among cached blocks. No verb may scan them."""

    def add(self, block: int) -> None:
        """`block` has lost its last holder and is cached now."""
        ...

    def remove(self, block: int) -> None:
        """`block` is no longer cached: it was hit, or dropped."""
        ...

    def evict(self) -> int:
        """Removes the block to give up next and returns it. There must be one."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The cached blocks in the order in which they would be given up."""
        ...


class LruEviction:
    """Least recently released first: a doubly linked list threaded through two arrays, each verb O(1).

    Entry 0, the null block's, is the list's head and tail in one.
    """

    __slots__ = ("_length", "_next", "_previous")

    def __init__(self, num_blocks: int) -> None:
        self._next = [_NOWHERE] * num_blocks
        self._previous = [_NOWHERE] * num_blocks
        self._next[0] = self._previous[0] = 0
        self._length = 0

    def add(self, block: int) -> None:
        last = self._previous[0]
        self._next[last] = self._previous[0] = block
        self._previous[block] = last
        self._next[block] = 0
        self._length += 1

    def remove(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self._next[block] = self._previous[block] = _NOWHERE
        self._length -= 1

    def evict(self) -> int:
        block = self._next[0]
        self.remove(block)
        return block

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]
