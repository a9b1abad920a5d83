"""Every block of a pool in exactly one state (free, cached, held), with its count and what it stores.

    free   --take-->    held    a fresh block; when none is free, cached blocks are given up for it first
    cached --share-->   held    a hit
    held   --release--> cached  it is published, so that a later prompt can hit it
    held   --release--> free    nobody could find it: a partial tail, or equal to a block that others hold

The verbs here trust their caller for capacity; the pool checks it before it changes anything.
"""

from __future__ import annotations

from itertools import compress, repeat
from operator import lt, not_

from kvmanager.cached_blocks import CachedBlocks
from kvmanager.errors import BrokenBooks
from kvmanager.events import EventLog
from kvmanager.hashing import HashChain
from kvmanager.policy import EvictionPolicy
from kvmanager.prefix_index import NO_NAME, PrefixIndex
from kvmanager.tenants import Tenant
from kvmanager.types import Totals


class BlockPool(CachedBlocks):
    """The blocks of one pool and their holders: taken, shared, stored, published and released."""

    __slots__ = ("block_size", "held", "partial", "promised", "references", "shared", "stored_tokens", "usable")

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        index: PrefixIndex,
        totals: Totals,
        events: EventLog,
    ) -> None:
        super().__init__(num_blocks, policy, index, totals, events)
        self.usable = num_blocks - 1
        self.block_size = block_size
        self.partial: dict[int, int] = {}
        """Tokens whose K/V is in each held block that has no name, where there are any; one with a name is full."""
        self.promised: set[int] = set()
        """Blocks with a name that will be computed in the next step; check() compares them with the sequences."""
        # Derived, each kept beside what it derives from; check() recomputes them.
        self.held = 0
        self.shared = 0
        self.references = 0
        self.stored_tokens = 0

    def take(self, count: int, tenant: Tenant) -> list[int]:
        """Fresh blocks for one holder each; gives up cached blocks when too few are free, or the quota asks for it."""
        own = tenant.over_quota(count)
        if own:
            self._evict(own, tenant)
        if count > len(self.free):
            self._evict(count - len(self.free))
        blocks = self.free[: -count - 1 : -1]
        del self.free[len(self.free) - count :]
        counts = self.counts
        for block in blocks:
            counts[block] = 1
        self.held += count
        self.references += count
        self.totals.allocated_blocks += count
        tenant.used += count
        if tenant.salt:
            self.tenants.of_block.update(dict.fromkeys(blocks, tenant))
        return blocks

    def hit(self, blocks: list[int]) -> None:
        """One holder more for each of the blocks that begin a prompt."""
        self.share(blocks)
        self.policy.hit(blocks)

    def share(self, blocks: list[int], times: int = 1) -> None:
        """`times` more holders for each of the cached or held blocks."""
        counts = self.counts
        before = [counts[block] for block in blocks]
        for place, block in enumerate(blocks):
            counts[block] = before[place] + times
        self.references += times * len(before)
        num_woken = before.count(0)
        self.shared += before.count(1) + (num_woken if times > 1 else 0)
        if num_woken:
            # Whoever holds a block holds those before it in the chain.
            self._wake(blocks[-num_woken:])
            self.held += num_woken
            self.stored_tokens += num_woken * self.block_size
            self.totals.reused_blocks += num_woken

    def release(self, blocks: list[int]) -> None:
        """One holder less for each; last of a chain first, none twice.

        Raises BrokenBooks, and changes nothing, when nobody holds one of them.
        """
        counts = self.counts
        for block in blocks:
            if counts[block] != 1:
                break
        else:
            for block in blocks:
                counts[block] = 0
            self.references -= len(blocks)
            self._let_go(blocks)
            return
        before = [counts[block] for block in blocks]
        if 0 in before:
            block = blocks[before.index(0)]
            raise BrokenBooks(f"block {block} was released with a count of {counts[block]}", block=block)
        self.references -= len(blocks)
        for block, count in zip(blocks, before, strict=True):
            counts[block] = count - 1
        self.shared -= before.count(2)
        self._let_go([block for block, count in zip(blocks, before, strict=True) if count == 1])

    def stored(self, block: int) -> int:
        """Tokens whose K/V is in a block."""
        return self.block_size if self.index.names[block] else self.partial.get(block, 0)

    def store(self, block: int, num_tokens: int) -> None:
        """K/V of the first `num_tokens` tokens of a held block is in the cache now."""
        gained = num_tokens - self.stored(block)
        if gained > 0:
            self.partial[block] = num_tokens
            self.stored_tokens += gained

    def store_tails(self, blocks: list[int], tokens: list[int]) -> None:
        """store() for each of the blocks."""
        partial = self.partial
        before = list(map(partial.get, blocks, repeat(0)))
        if (
            len(set(blocks)) < len(blocks)
            or not all(map(lt, before, tokens))
            or any(map(self.index.names.__getitem__, compress(blocks, map(not_, before))))
        ):
            # Some are shared: what one holder says of them, another may have said.
            for block, num_tokens in zip(blocks, tokens, strict=True):
                self.store(block, num_tokens)
            return
        partial.update(zip(blocks, tokens, strict=True))
        self.stored_tokens += sum(tokens) - sum(before)

    def cut(self, block: int, num_tokens: int) -> None:
        """A held block that is nobody else's, nor to be found, holds no more than its first `num_tokens` tokens."""
        lost = self.partial.get(block, 0) - num_tokens
        if lost > 0 and self.counts[block] == 1:
            self.partial[block] = num_tokens
            self.stored_tokens -= lost

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> int:
        """Makes the full held blocks at indices first..last-1 of a chain findable. Returns the index of the first
        that could not be, because its name means something else already; `last` when all could.

        Raises BrokenBooks for a block that has another name.
        """
        chain.compute(last)
        names = self.index.names
        if (
            last == first + 1
            and not names[blocks[first]]
            and not self.index.find(chain.names[first], first, blocks[first - 1])
        ):
            # The common case: a sequence has filled its last block.
            self._publish_new(blocks, chain, first, last)
            return last
        for index in range(first, last):
            block, name = blocks[index], chain.names[index]
            if names[block] == name:
                continue
            if names[block]:
                raise BrokenBooks(f"block {block} was published under a second name", block=block)
            owner = self.index.find(name, index, blocks[index - 1])
            if not owner:
                end = self.index.end_of_new(blocks, chain, index, last)
                self._publish_new(blocks, chain, index, end)
                return end
            if not self.index.holds(owner, chain, index):
                return index
            self._publish_again(block, owner, chain, index)
        return last

    def can_unpublish(self, block: int, withdrawn: int = 0) -> bool:
        """Whether a published block may lose its name, after `withdrawn` other blocks of that name have lost theirs.

        Not when the name would go with it and it is continued or pinned: then its holder needs a copy.
        """
        name = self.index.names[block]
        if self.index.num_blocks(name) - withdrawn > 1:
            return True
        owner = self.index.owner(block)
        return not self.index.num_children(owner) and owner not in self.pins.until

    def unpublish(self, block: int, num_tokens: int) -> None:
        """Takes the name of a block that its only holder will write behind its first `num_tokens` tokens."""
        name, heir = self.index.names[block], self.index.twin(block)
        parent = self.index.withdraw(block)
        self.policy.forget(block)
        self.note_forgotten([block])
        if heir:
            self._move_marks(block, heir)
        else:
            self._drop_marks(block)
            self.events.removed((name,))
        self.partial[block] = num_tokens
        self.stored_tokens -= self.block_size - num_tokens
        self._offer_leaf(parent)

    def forget_cached(self) -> int:
        """Frees every cached block and returns how many there were; nothing may be held."""
        forgotten = [block for block, name in enumerate(self.index.names) if name]
        for block in forgotten:
            self._retract(block)
            self._to_free(block)
        # Chains lie in ascending blocks, mostly, and are forgotten faster from their ends.
        for block in reversed(forgotten):
            self.policy.forget(block)
        self.index.clear()
        self.pins.clear()
        for tenant in self.tenants.everyone():
            tenant.cached = tenant.pinned = 0
        self.cached = 0
        self.note_forgotten(forgotten)
        self.events.cleared()
        return len(forgotten)

    def _let_go(self, idle: list[int]) -> None:
        """Blocks that lost their last holder become cached, or free when nobody could find them."""
        names, unnamed = self.index.names, 0
        self.held -= len(idle)
        self.totals.freed_blocks += len(idle)
        # The blocks of a sequence are published from its first on.
        for block in idle:
            if names[block]:
                break
            unnamed += 1
        if unnamed:
            self._free_unnamed(idle[:unnamed])
        cached = idle[unnamed:] if unnamed else idle
        self.stored_tokens -= self.block_size * len(cached)
        if self.index.has_spares():
            cached = [block for block in cached if self.index.is_sole(block) or self._free_duplicate(block)]
        if cached:
            self._cache(cached)

    def _free_unnamed(self, blocks: list[int]) -> None:
        partial = self.partial
        if partial:
            for block in blocks:
                if block in partial:
                    self.stored_tokens -= partial.pop(block)
        if self.tenants.of_block:
            for block in blocks:
                self._to_free(block)
            return
        self.free += blocks
        self.tenants.base.used -= len(blocks)

    def _publish_new(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        known, run, names = self.index.names, blocks[first:last], chain.names[first:last]
        for block in run:
            if known[block]:
                raise BrokenBooks(f"block {block} was published under a second name", block=block)
        self.index.publish(blocks, chain, first, last)
        self._stored_whole(run)
        self.policy.store(run, names, first)
        parent = chain.names[first - 1] if first else NO_NAME
        scope = chain.scope
        self.events.stored(tuple(names), parent, scope.adapter_id, scope.adapter_version)

    def _stored_whole(self, blocks: list[int]) -> None:
        """Held blocks that have just got their names."""
        self.stored_tokens += self.block_size * len(blocks)
        partial = self.partial
        if partial and not partial.keys().isdisjoint(blocks):
            for block in blocks:
                self.stored_tokens -= partial.pop(block, 0)

    def _publish_again(self, block: int, owner: int, chain: HashChain, index: int) -> None:
        if self.counts[owner]:
            self.index.add_spare(block, owner)
        else:
            # A held block is worth more than a cached one of the same content, which can be reused at once.
            self._replace(owner, block)
        self._stored_whole([block])
        self.policy.store([block], [chain.names[index]], index)
