"""Every block of a pool in exactly one state (free, cached, held), with its count and its name.

    free   --take-->   held    a fresh block
    cached --take-->   held    evicted first, when no block is free
    cached --share-->  held    a hit
    held   --release-> cached  it is published, so that a later prompt can hit it
    held   --release-> free    nobody could find it: a partial tail, or equal to a block that others hold

The verbs here trust their caller for capacity; the pool checks it before it changes anything.
"""

from __future__ import annotations

from kvmanager.errors import BrokenBooks
from kvmanager.eviction import EvictionPolicy
from kvmanager.prefix_index import PrefixIndex
from kvmanager.types import NULL_BLOCK, Totals


class BlockPool:
    """Counts, names, the free blocks, the cached ones and the prefix index of one pool."""

    __slots__ = (
        "block_size",
        "cached",
        "counts",
        "free",
        "held",
        "index",
        "names",
        "references",
        "shared",
        "stored",
        "stored_tokens",
        "totals",
        "usable",
    )

    def __init__(
        self, num_blocks: int, block_size: int, eviction: EvictionPolicy, index: PrefixIndex, totals: Totals
    ) -> None:
        self.usable = num_blocks - 1
        self.block_size = block_size
        self.counts = [0] * num_blocks
        self.names: list[bytes | None] = [None] * num_blocks
        self.stored = [0] * num_blocks
        """Tokens whose K/V is in each block."""
        self.free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        """A stack: the block given back last is taken first."""
        self.cached = eviction
        self.index = index
        self.totals = totals
        # Derived, each kept beside what it derives from; check() recomputes them.
        self.held = 0
        self.shared = 0
        self.references = 0
        self.stored_tokens = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A fresh block for one holder; gives up a cached block when none is free."""
        block = self.free.pop() if self.free else self._evict()
        self.counts[block] = 1
        self.held += 1
        self.references += 1
        self.totals.allocated_blocks += 1
        return block

    def share(self, block: int, times: int = 1) -> None:
        """`times` more holders for a cached or held block."""
        count = self.counts[block]
        if count == 0:
            self.cached.remove(block)
            self.held += 1
            self.stored_tokens += self.stored[block]
            self.totals.reused_blocks += 1
        if count <= 1 < count + times:
            self.shared += 1
        self.counts[block] = count + times
        self.references += times

    def release(self, block: int) -> None:
        """One holder less. Raises BrokenBooks, and changes nothing, for a block that nobody holds."""
        count = self.counts[block]
        if count <= 0 or block == NULL_BLOCK:
            raise BrokenBooks(f"block {block} was released with a count of {count}", block=block, count=count)
        self.counts[block] = count - 1
        self.references -= 1
        if count == 2:
            self.shared -= 1
        if count == 1:
            self._let_go(block)

    def store(self, block: int, num_tokens: int) -> None:
        """K/V of the first `num_tokens` tokens of a held block is in the cache now."""
        gained = num_tokens - self.stored[block]
        if gained > 0:
            self.stored[block] = num_tokens
            self.stored_tokens += gained

    def publish(self, block: int, name: bytes) -> None:
        """Makes a full held block findable under `name`. Raises BrokenBooks for a block that has another name."""
        if self.names[block] == name:
            return
        if self.names[block] is not None:
            raise BrokenBooks(f"block {block} was published under a second name", block=block)
        self.names[block] = name
        owner = self.index.owner(name)
        if owner is not None and not self.counts[owner]:
            # A held block is worth more than a cached one of the same content, which can be reused at once.
            self.cached.remove(owner)
            self._drop(owner)
        self.index.publish(name, block)

    def forget_cached(self) -> int:
        """Frees every cached block and returns how many there were."""
        forgotten = len(self.cached)
        while len(self.cached):
            self._drop(self.cached.evict())
        return forgotten

    def _evict(self) -> int:
        block = self.cached.evict()
        self.totals.evicted_blocks += 1
        self._drop(block)
        return self.free.pop()

    def _let_go(self, block: int) -> None:
        self.held -= 1
        self.stored_tokens -= self.stored[block]
        self.totals.freed_blocks += 1
        name = self.names[block]
        if name is not None and self.index.is_sole(name, block):
            self.cached.add(block)
        else:
            self._drop(block)

    def _drop(self, block: int) -> None:
        name = self.names[block]
        if name is not None:
            self.index.withdraw(name, block)
        self.names[block] = None
        self.stored[block] = 0
        self.free.append(block)
