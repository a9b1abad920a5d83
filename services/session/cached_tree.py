"""Blocks that no sequence holds and that can still be hit, as far as their runner knows: each with its parent.

The KV manager may know of fewer: it keeps one of several blocks with equal content. That does no harm. What counts is
that the K/V of each block here is still that of its tokens behind its parents', because nobody has written there since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """parent: the block before it in its chain, 0 for one that begins a prompt. tokens: a column of block_size ids."""

    parent: int
    tokens: bytes
    salt: str


class CachedTree:
    """Idle blocks, the least recently used first. A parent that is not among them is held by a sequence."""

    def __init__(self) -> None:
        self.blocks: dict[int, CachedBlock] = {}
        self.children: dict[int, set[int]] = {}
        """By parent, idle or held; derived from `blocks`."""

    def add(self, block: int, cached: CachedBlock) -> None:
        """A block that nobody holds any more; it is the most recently used one now."""
        self.wake(block)
        self.blocks[block] = cached
        self.children.setdefault(cached.parent, set()).add(block)

    def wake(self, block: int) -> None:
        """A sequence holds the block again, with what is in it; those behind it stay."""
        cached = self.blocks.pop(block, None)
        if cached is not None:
            siblings = self.children[cached.parent]
            siblings.discard(block)
            if not siblings:
                del self.children[cached.parent]

    def discard(self, block: int) -> None:
        """The block will be written, or must not be found: it goes, and so do all behind it."""
        due = [block]
        while due:
            gone = due.pop()
            due.extend(self.children.get(gone, ()))
            self.wake(gone)

    def discard_all(self, blocks: Iterable[int]) -> None:
        """discard() for each."""
        for block in blocks:
            if block in self.blocks or block in self.children:
                self.discard(block)

    def in_order(self) -> Iterator[tuple[int, CachedBlock]]:
        """All blocks, each after its parent; among the others the least recently used first."""
        told: set[int] = set()
        for block in self.blocks:
            path: list[int] = []
            while block in self.blocks and block not in told:
                told.add(block)
                path.append(block)
                block = self.blocks[block].parent
            for each in reversed(path):
                yield each, self.blocks[each]
