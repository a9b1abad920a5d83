"""The holding: which blocks of its pool a runner holds, by live sequences, in its lease, and idle ones that can be hit.

It is the truth of the physical cache. Nothing here knows of messages.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.columns import to_column
from services.session.cached_tree import CachedBlock, CachedTree
from services.session.held import Held


class Holding:
    """Each block is in one place: block tables, the lease, or among the idle ones. Not thread-safe."""

    def __init__(self, num_blocks: int, block_size: int, *, caches: bool = True) -> None:
        """caches: whether full blocks can be hit after the end of their sequences."""
        self.block_size = block_size
        self.caches = caches
        self.live: dict[str, Held] = {}
        self.by_handle: dict[int, Held] = {}
        self.counts = [0] * num_blocks
        """Entries of the live sequences' block tables, by block; derived."""
        self.held_blocks = 0
        """Blocks that live sequences hold; derived. Any thread may ask."""
        self.forking = 0
        """Live sequences that ask for no room ahead, because they fork often; derived."""
        self.lease: list[int] = []
        self.cached = CachedTree()
        self.taken_total = 0
        """Blocks that were taken from the lease."""

    @property
    def holds_something(self) -> bool:
        """Whether there is anything to report."""
        return bool(self.live or self.lease or self.cached.blocks)

    def held(self, sequence_id: str) -> Held:
        """The live sequence. Raises ValueError."""
        held = self.live.get(sequence_id)
        if held is None:
            raise ValueError(f"no live sequence {sequence_id!r}")
        return held

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks so many tokens need."""
        return -(-num_tokens // self.block_size)

    def add_to_lease(self, blocks: list[int]) -> None:
        """More spare blocks."""
        self.cached.discard_all(blocks)
        self.lease += blocks

    def enter(self, held: Held) -> None:
        """A sequence lives, with its block table."""
        self.live[held.sequence_id] = held
        self.by_handle[held.handle] = held
        self.forking += held.forks_often
        self._count(held.blocks)

    def enter_admitted(self, held: Held, blocks: list[int], cached_tokens: int) -> None:
        """A prompt is admitted: its block table, and how many of its tokens were found in the cache."""
        held.begin(blocks, cached_tokens)
        hits = cached_tokens // self.block_size
        for block in blocks[:hits]:
            self.cached.wake(block)
        self.cached.discard_all(blocks[hits:])
        self.enter(held)

    def leave(self, held: Held) -> None:
        """Its blocks are nobody's, or can still be hit; the beginning of the chain outlives its end."""
        del self.live[held.sequence_id], self.by_handle[held.handle]
        self.forking -= held.forks_often
        if held.promised:
            self._break_promise(held)
        full = min(held.computed, held.sound) // self.block_size if self.caches else 0
        for index in range(len(held.blocks) - 1, -1, -1):
            block = held.blocks[index]
            self._uncount([block])
            if not self.counts[block] and index < full:
                tokens = held.tokens[index * self.block_size : (index + 1) * self.block_size]
                parent = held.blocks[index - 1] if index else 0
                self.cached.add(block, CachedBlock(parent, to_column(tokens), held.salt))

    def take(self, held: Held, count: int) -> None:
        """Moves blocks of the lease to the end of a table."""
        if not held.taken:
            held.taken_at = len(held.blocks)
        blocks = [self.lease.pop() for _ in range(count)]
        held.blocks += blocks
        held.taken += blocks
        self._count(blocks)
        self.taken_total += count

    def grant(self, held: Held, first: int, blocks: list[int]) -> None:
        """A table is these blocks from index `first` on."""
        self._uncount(held.blocks[first:])
        held.blocks[first:] = blocks
        self._count(blocks)
        self.cached.discard_all(blocks)
        held.shown = min(held.shown, first)

    def cut(self, held: Held, num_blocks: int) -> None:
        """A table loses what is behind its first blocks."""
        self._uncount(held.cut_blocks(num_blocks))

    def is_shared(self, held: Held) -> bool:
        """Whether others hold a block that the sequence writes next or later."""
        return any(self.counts[block] > 1 for block in held.blocks[held.computed // self.block_size :])

    def empty(self) -> None:
        """Nothing is held any more."""
        self.live.clear()
        self.by_handle.clear()
        self.counts = [0] * len(self.counts)
        self.held_blocks = self.forking = 0
        self.lease = []
        self.cached = CachedTree()

    def _count(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.held_blocks += not self.counts[block]
            self.counts[block] += 1

    def _uncount(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.counts[block] -= 1
            self.held_blocks -= not self.counts[block]

    def _break_promise(self, held: Held) -> None:
        """A step has failed: whoever relied on what it was to compute caches nothing from there on."""
        first = held.computed // self.block_size
        gone = set(held.blocks[first : held.promised // self.block_size])
        self.cached.discard_all(gone)
        for other in self.live.values():
            lost = [index for index, block in enumerate(other.blocks) if block in gone]
            if lost:
                other.sound = min(other.sound, lost[0] * self.block_size)
