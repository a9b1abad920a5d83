"""Every block of a pool in exactly one state (free, cached, held), with its count and what it stores.

    free   --take-->    held    a fresh block; when none is free, cached blocks are given up for it first
    cached --share-->   held    a hit
    held   --release--> cached  it is published, so that a later prompt can hit it
    held   --release--> free    nobody could find it: a partial tail, or equal to a block that others hold

A cached block may be given up once no published block continues it: leaves first, whatever the policy. The verbs here
trust their caller for capacity; the pool checks it before it changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from kvmanager.errors import BrokenBooks
from kvmanager.events import EventLog
from kvmanager.hashing import HashChain
from kvmanager.pins import Pins
from kvmanager.policy import EvictionPolicy
from kvmanager.prefix_index import NO_BLOCK, NO_NAME, PrefixIndex
from kvmanager.tenants import Tenant, Tenants
from kvmanager.types import NULL_BLOCK, Totals
from kvmanager.victims import Victims


class BlockPool:
    """Counts, the free blocks, the cached ones in the order they are given up, and the prefix index of one pool."""

    __slots__ = (
        "block_size",
        "cached",
        "counts",
        "events",
        "free",
        "held",
        "index",
        "partial",
        "pins",
        "policy",
        "priorities",
        "references",
        "shared",
        "stored_tokens",
        "tenants",
        "totals",
        "usable",
        "victims",
    )

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        policy: EvictionPolicy,
        index: PrefixIndex,
        totals: Totals,
        events: EventLog,
    ) -> None:
        self.usable = num_blocks - 1
        self.block_size = block_size
        self.counts: list[int] = [0] * num_blocks
        self.partial: dict[int, int] = {}
        """Tokens whose K/V is in each held block that has no name, where there are any; one with a name is full."""
        self.free: list[int] = list(range(num_blocks - 1, NULL_BLOCK, -1))
        """A stack: the block given back last is taken first."""
        self.index = index
        self.policy = policy
        self.victims = Victims()
        self.priorities: dict[int, int] = {}
        """Of the cached and held blocks that have one above 0."""
        self.pins = Pins()
        self.tenants = Tenants()
        self.totals = totals
        self.events = events
        # Derived, each kept beside what it derives from; check() recomputes them.
        self.cached = 0
        self.held = 0
        self.shared = 0
        self.references = 0
        self.stored_tokens = 0

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self.free) + self.cached - self.pins.idle

    # Verbs.

    def take(self, count: int, tenant: Tenant) -> list[int]:
        """Fresh blocks for one holder each; gives up cached blocks when too few are free, or the quota asks for it."""
        own = tenant.over_quota(count)
        if own and tenant.victims is not None:
            self._evict(own, tenant.victims)
        if count > len(self.free):
            self._evict(count - len(self.free), self.victims)
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

    def share(self, blocks: Seq[int], times: int = 1) -> None:
        """`times` more holders for each of the cached or held blocks."""
        counts, woken, newly_shared = self.counts, [], 0
        for block in blocks:
            count = counts[block]
            counts[block] = count + times
            if count == 0:
                woken.append(block)
            if count <= 1 < count + times:
                newly_shared += 1
        self.shared += newly_shared
        self.references += times * len(blocks)
        if woken:
            self._wake(woken)

    def release(self, blocks: list[int]) -> None:
        """One holder less for each; last of a chain first, none twice.

        Raises BrokenBooks, and changes nothing, when nobody holds one of them.
        """
        counts = self.counts
        before = [counts[block] for block in blocks]
        if before.count(1) == len(before):
            for block in blocks:
                counts[block] = 0
            self.references -= len(blocks)
            self._let_go(blocks)
            return
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
        for index in range(first, last):
            block, name = blocks[index], chain.names[index]
            if names[block] == name:
                continue
            if names[block]:
                raise BrokenBooks(f"block {block} was published under a second name", block=block)
            owner = self.index.owner(name)
            if not owner:
                # What follows a name that nobody has published is new as well, unless names collide.
                end = self._end_of_new(chain.names, index, last) if chain.names_may_collide else last
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
        owner = self.index.owner(name)
        return not self.index.children[owner] and owner not in self.pins.until

    def unpublish(self, block: int, num_tokens: int) -> None:
        """Takes the name of a block that its only holder will write behind its first `num_tokens` tokens."""
        name = self.index.names[block]
        parent = self.index.withdraw(block)
        self.policy.forget(block)
        heir = self.index.owner(name)
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
            self._to_free(block)
            self.policy.forget(block)
        self.index.clear()
        self.victims.clear()
        self.pins.clear()
        self.priorities.clear()
        for tenant in self.tenants.everyone():
            tenant.cached = tenant.pinned = 0
            if tenant.victims is not None:
                tenant.victims.clear()
        self.cached = 0
        self.events.cleared()
        return len(forgotten)

    def remove(self, block: int) -> None:
        """Frees a cached block that no published block continues."""
        tenant = self.tenants.owner(block)
        self._retract(block)
        if block in self.pins.until:
            self.pins.idle -= 1
            tenant.pinned -= 1
        self.events.removed((self.index.names[block],))
        self.policy.forget(block)
        self._offer_leaf(self._give_up(block, tenant))
        self.totals.removed_blocks += 1

    def retain(self, blocks: list[int], priority: int, pinned_blocks: int, until: float) -> None:
        """Keeps what the published ones of `blocks` hold: their priority, and a pin on the first `pinned_blocks`."""
        for index, block in enumerate(blocks):
            if not self.index.names[block]:
                break
            owner = self.index.owner(self.index.names[block])
            if priority > self.priorities.get(owner, 0):
                self.priorities[owner] = priority
            if index < pinned_blocks:
                self.pins.pin(owner, until)

    def expire_pins(self, now: float) -> None:
        """Lets go of the pins that have run out at `now`, in seconds of the pool's clock."""
        for block in self.pins.expire(now):
            if not self.counts[block]:
                self.pins.idle -= 1
                self.tenants.owner(block).pinned -= 1
                self._offer_leaf(block)

    def apply_quota(self, tenant: Tenant) -> None:
        """Lets a tenant's own order of victims follow its quota; O(candidates)."""
        tenant.victims = Victims() if tenant.quota else None
        if tenant.victims is not None:
            for block in self.victims:
                if self.tenants.owner(block) is tenant:
                    tenant.victims.offer(block, self.priorities.get(block, 0), self.policy.rank(block))

    # Changes of state.

    def _evict(self, count: int, victims: Victims) -> None:
        """Gives up `count` blocks. A parent that is now the first to go follows at once, without a turn in the heap."""
        index, policy, counts, pinned = self.index, self.policy, self.counts, self.pins.until
        of_block, base, priorities = self.tenants.of_block, self.tenants.base, self.priorities
        removed: list[bytes] = []
        block = NO_BLOCK
        for _ in range(count):
            block = block or self._pop_victim(victims)
            name = index.names[block]
            removed.append(name)
            policy.evicted(block, name)
            parent = index.withdraw_leaf(block)
            tenant = of_block.pop(block, base) if of_block else base
            tenant.used -= 1
            tenant.cached -= 1
            self.free.append(block)
            if priorities:
                priorities.pop(block, None)
            block = NO_BLOCK
            if not parent or counts[parent] or index.children[parent] or parent in pinned:
                continue
            rank = policy.rank(parent)
            priority = priorities.get(parent, 0) if priorities else 0
            if tenant.victims is None and victims.comes_first(parent, priority, rank):
                block = parent
            else:
                self._enter(parent, priority, rank, tenant)
        if block:
            self._offer_leaf(block)
        self.cached -= count
        self.totals.evicted_blocks += count
        self.events.removed(tuple(removed))

    def _pop_victim(self, victims: Victims) -> int:
        """Takes the first of one order of victims, and out of the other one if it is in two."""
        block = victims.pop()
        tenant = self.tenants.owner(block)
        if tenant.victims is not None:
            other = self.victims if victims is tenant.victims else tenant.victims
            other.retract(block)
        return block

    def _give_up(self, block: int, tenant: Tenant) -> int:
        """Frees a cached leaf that is no victim any more. Returns the owner of its parent's name, NO_BLOCK for none."""
        parent = self.index.withdraw_leaf(block)
        self.cached -= 1
        tenant.cached -= 1
        self._to_free(block)
        return parent

    def _let_go(self, idle: list[int]) -> None:
        """Blocks that lost their last holder become cached, or free when nobody could find them."""
        names = self.index.names
        self.held -= len(idle)
        self.totals.freed_blocks += len(idle)
        cached = [block for block in idle if names[block]]
        if len(cached) < len(idle):
            self._free_unnamed([block for block in idle if not names[block]] if cached else idle)
        self.stored_tokens -= self.block_size * len(cached)
        if self.index.has_spares():
            cached = [block for block in cached if self.index.is_sole(block) or self._free_duplicate(block)]
        if cached:
            self._cache(cached)

    def _free_unnamed(self, blocks: list[int]) -> None:
        partial = self.partial
        for block in blocks:
            if block in partial:
                self.stored_tokens -= partial.pop(block)
        if self.tenants.of_block:
            for block in blocks:
                self._to_free(block)
            return
        self.free += blocks
        self.tenants.base.used -= len(blocks)

    def _cache(self, blocks: list[int]) -> None:
        """Published blocks that nobody holds any more."""
        self.cached += len(blocks)
        if self.tenants.of_block or self.pins.until:
            for block in blocks:
                tenant = self.tenants.owner(block)
                tenant.cached += 1
                if block in self.pins.until:
                    self.pins.idle += 1
                    tenant.pinned += 1
        else:
            self.tenants.base.cached += len(blocks)
        self.policy.release(blocks)
        children = self.index.children
        for block in [block for block in blocks if not children[block]]:
            self._offer_leaf(block)

    def _wake(self, woken: list[int]) -> None:
        """Cached blocks that are held from now on."""
        self.held += len(woken)
        self.cached -= len(woken)
        self.stored_tokens += len(woken) * self.block_size
        self.totals.reused_blocks += len(woken)
        children = self.index.children
        for block in woken:
            if not children[block]:
                self._retract(block)
        if not self.tenants.of_block and not self.pins.until:
            self.tenants.base.cached -= len(woken)
            return
        for block in woken:
            tenant = self.tenants.owner(block)
            tenant.cached -= 1
            if block in self.pins.until:
                self.pins.idle -= 1
                tenant.pinned -= 1

    def _end_of_new(self, names: list[bytes], first: int, last: int) -> int:
        """The index behind the run of names, from a new one on, that nothing else has."""
        seen: set[bytes] = set()
        for index in range(first, last):
            if names[index] in seen or self.index.owner(names[index]):
                return index
            seen.add(names[index])
        return last

    def _publish_new(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        for block in blocks[first:last]:
            if self.index.names[block]:
                raise BrokenBooks(f"block {block} was published under a second name", block=block)
        self.index.publish(blocks, chain, first, last)
        self._stored_whole(blocks[first:last])
        names = chain.names
        for index in range(first, last):
            self.policy.store(blocks[index], names[index], index)
        parent = names[first - 1] if first else NO_NAME
        scope = chain.scope
        self.events.stored(tuple(names[first:last]), parent, scope.adapter_id, scope.adapter_version)

    def _stored_whole(self, blocks: list[int]) -> None:
        """Held blocks that have just got their names."""
        self.stored_tokens += self.block_size * len(blocks)
        partial = self.partial
        if partial:
            for block in blocks:
                if block in partial:
                    self.stored_tokens -= partial.pop(block)

    def _publish_again(self, block: int, owner: int, chain: HashChain, index: int) -> None:
        if self.counts[owner]:
            self.index.add_spare(block, chain, index)
        else:
            # A held block is worth more than a cached one of the same content, which can be reused at once.
            self._replace(owner, block, chain, index)
        self._stored_whole([block])
        self.policy.store(block, chain.names[index], index)

    def _replace(self, owner: int, block: int, chain: HashChain, index: int) -> None:
        tenant = self.tenants.owner(owner)
        self._retract(owner)
        self.index.replace(owner, block, chain, index)
        self.policy.forget(owner)
        if owner in self.pins.until:
            self.pins.idle -= 1
            tenant.pinned -= 1
        self._move_marks(owner, block)
        self.cached -= 1
        tenant.cached -= 1
        self._to_free(owner)

    def _free_duplicate(self, block: int) -> bool:
        """Frees a block whose content another held one has too; what was promised for it goes on to that one. False."""
        name = self.index.names[block]
        self.index.withdraw(block)
        self.policy.forget(block)
        self._move_marks(block, self.index.owner(name))
        self._to_free(block)
        return False

    def _to_free(self, block: int) -> None:
        self.free.append(block)
        if self.tenants.of_block:
            self.tenants.of_block.pop(block, self.tenants.base).used -= 1
        else:
            self.tenants.base.used -= 1
        if self.priorities or self.pins.until:
            self._drop_marks(block)

    def _offer_leaf(self, block: int) -> None:
        """Offers a block as a victim if it is cached, unpinned and continued by nothing. NO_BLOCK is none."""
        if not block or self.counts[block] or self.index.children[block] or block in self.pins.until:
            return
        priority = self.priorities.get(block, 0) if self.priorities else 0
        self._enter(block, priority, self.policy.rank(block), self.tenants.owner(block))

    def _enter(self, block: int, priority: int, rank: int, tenant: Tenant) -> None:
        """Enters a block that may go into the orders of victims that it belongs to."""
        self.victims.offer(block, priority, rank)
        if tenant.victims is not None:
            tenant.victims.offer(block, priority, rank)

    def _retract(self, block: int) -> None:
        self.victims.retract(block)
        tenant = self.tenants.owner(block)
        if tenant.victims is not None:
            tenant.victims.retract(block)

    def _move_marks(self, block: int, heir: int) -> None:
        """Gives the heir of a name what was promised for the block that had it."""
        if block in self.priorities:
            self.priorities[heir] = max(self.priorities.pop(block), self.priorities.get(heir, 0))
        if block in self.pins.until:
            self.pins.pin(heir, self.pins.until[block])
            self.pins.unpin(block)

    def _drop_marks(self, block: int) -> None:
        self.priorities.pop(block, None)
        self.pins.unpin(block)
