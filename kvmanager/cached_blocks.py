"""The cached blocks of a pool: which of them may be given up, in which order, and what is promised for them.

A cached block may be given up once no published block continues it: leaves first, whatever the policy. Each change of
state here moves blocks between cached, free and held, and keeps what each tenant occupies.
"""

from __future__ import annotations

from kvmanager.events import EventLog
from kvmanager.pins import Pins
from kvmanager.policy import EvictionPolicy
from kvmanager.prefix_index import PrefixIndex
from kvmanager.tenants import Tenant, Tenants
from kvmanager.types import NULL_BLOCK, Totals
from kvmanager.victims import Victims


class CachedBlocks:
    """Counts, free blocks, the prefix index, and the order in which cached blocks are given up."""

    __slots__ = (
        "cached",
        "counts",
        "events",
        "forgotten",
        "free",
        "index",
        "kept",
        "pins",
        "policy",
        "priorities",
        "tenants",
        "totals",
    )

    def __init__(
        self, num_blocks: int, policy: EvictionPolicy, index: PrefixIndex, totals: Totals, events: EventLog
    ) -> None:
        self.counts: list[int] = [0] * num_blocks
        self.free: list[int] = list(range(num_blocks - 1, NULL_BLOCK, -1))
        """A stack: the block given back last is taken first."""
        self.index = index
        self.policy = policy
        self.kept = Victims()
        """Candidates with a priority above 0: they go when the policy has nothing on offer."""
        self.priorities: dict[int, int] = {}
        """Of the cached and held blocks that have one above 0."""
        self.pins = Pins()
        self.tenants = Tenants()
        self.totals = totals
        self.events = events
        self.forgotten: set[int] | None = None
        """Blocks whose names went since a runner was last told; None while none listens."""
        self.cached = 0
        """Derived; check() recomputes it."""

    @property
    def available(self) -> int:
        """Blocks that can be taken now."""
        return len(self.free) + self.cached - self.pins.idle

    def remove(self, block: int) -> None:
        """Frees a cached block that no published block continues."""
        tenant = self.tenants.owner(block)
        self._retract(block)
        if block in self.pins.until:
            self.pins.idle -= 1
            tenant.pinned -= 1
        self.events.removed((self.index.names[block],))
        self.policy.forget(block)
        self.note_forgotten([block])
        self._offer_leaf(self._give_up(block, tenant))
        self.totals.removed_blocks += 1

    def retain(self, blocks: list[int], priority: int, pinned_blocks: int, until: float) -> None:
        """Keeps what the published ones of `blocks` hold: their priority, and a pin on the first `pinned_blocks`."""
        for index, block in enumerate(blocks):
            if not self.index.names[block]:
                break
            owner = self.index.owner(block)
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
            for block in [*self.policy.offered(), *self.kept.members()]:
                if self.tenants.owner(block) is tenant:
                    tenant.victims.offer(block, self.priorities.get(block, 0), self.policy.released_at(block))

    def note_forgotten(self, blocks: list[int]) -> None:
        """Blocks that can't be hit any more; at most all of the pool wait to be told."""
        if self.forgotten is not None:
            self.forgotten.update(blocks)

    def _evict(self, count: int, tenant: Tenant | None = None) -> None:
        """Gives up `count` blocks, of one tenant under a quota or of all."""
        removed: list[bytes] = []
        while len(removed) < count:
            blocks = self._next_victims(count - len(removed), tenant)
            owner = self.tenants.owner(blocks[0])
            names = self.index.names
            gone = [names[block] for block in blocks]
            removed += gone
            self.policy.evicted(blocks, gone)
            parent = self.index.withdraw_leaves(blocks)
            owner.used -= len(blocks)
            owner.cached -= len(blocks)
            self.free += blocks
            if owner.salt or self.priorities:
                self._drop_owner(blocks)
            self._offer_leaf(parent)
        self.cached -= count
        if self.forgotten is not None:
            self.note_forgotten(self.free[len(self.free) - count :])
        self.totals.evicted_blocks += count
        self.events.removed(tuple(removed))

    def _next_victims(self, most: int, tenant: Tenant | None) -> list[int]:
        """The first to go, out of all orders but the policy's, and those before it that go next; at most `most`."""
        if tenant is not None and tenant.victims is not None:
            block = tenant.victims.pop()
            self.policy.remove(block)
            self.kept.retract(block)
            return [block]
        blocks = self.policy.victims(most) or [self.kept.pop()]
        owner = self.tenants.owner(blocks[0])
        if owner.victims is not None:
            owner.victims.retract(blocks[0])
            return blocks[:1]
        idle = self._num_idle(blocks)
        return blocks if idle == len(blocks) else blocks[:idle]

    def _num_idle(self, blocks: list[int]) -> int:
        """How many of a leaf and the cached blocks before it nothing else continues or keeps."""
        index, pinned, priorities = self.index, self.pins.until, self.priorities
        if not pinned and not priorities and index.continued_once(blocks):
            return len(blocks)
        for place in range(1, len(blocks)):
            block = blocks[place]
            if index.num_children(block) != 1 or block in pinned or block in priorities:
                return place
        return len(blocks)

    def _give_up(self, block: int, tenant: Tenant) -> int:
        """Frees a cached leaf that is no victim any more. Returns the owner of its parent's name, NO_BLOCK for none."""
        parent = self.index.withdraw_leaves([block])
        self.cached -= 1
        tenant.cached -= 1
        self._to_free(block)
        return parent

    def _cache(self, blocks: list[int]) -> None:
        """Published blocks of a chain that nobody holds any more, last first: all but that one are continued."""
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
        self._offer_leaf(blocks[0])

    def _wake(self, woken: list[int]) -> None:
        """Cached blocks of a chain that are held from now on, last one last: all but that one are continued."""
        self.cached -= len(woken)
        if not self.index.num_children(woken[-1]):
            self._retract(woken[-1])
        if not self.tenants.of_block and not self.pins.until:
            self.tenants.base.cached -= len(woken)
            return
        for block in woken:
            tenant = self.tenants.owner(block)
            tenant.cached -= 1
            if block in self.pins.until:
                self.pins.idle -= 1
                tenant.pinned -= 1

    def _replace(self, owner: int, block: int) -> None:
        tenant = self.tenants.owner(owner)
        self._retract(owner)
        self.index.replace(owner, block)
        self.policy.forget(owner)
        if owner in self.pins.until:
            self.pins.idle -= 1
            tenant.pinned -= 1
        self._move_marks(owner, block)
        self.cached -= 1
        tenant.cached -= 1
        self.note_forgotten([owner])
        self._to_free(owner)

    def _free_duplicate(self, block: int) -> bool:
        """Frees a block whose content another held one has too; what was promised for it goes on to that one. False."""
        heir = self.index.twin(block)
        self.index.withdraw(block)
        self.policy.forget(block)
        self._move_marks(block, heir)
        self.note_forgotten([block])
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
        if block and not self.counts[block] and not self.index.num_children(block) and block not in self.pins.until:
            self._enter(block, self.tenants.owner(block))

    def _enter(self, block: int, tenant: Tenant) -> None:
        """Enters a block that may go into the orders of victims that it belongs to."""
        priority = self.priorities.get(block, 0) if self.priorities else 0
        if priority:
            self.kept.offer(block, priority, self.policy.released_at(block))
        else:
            self.policy.add(block)
        if tenant.victims is not None:
            tenant.victims.offer(block, priority, self.policy.released_at(block))

    def _retract(self, block: int) -> None:
        """Takes a block out of all orders of victims."""
        self.policy.remove(block)
        if self.priorities:
            self.kept.retract(block)
        victims = self.tenants.owner(block).victims
        if victims is not None:
            victims.retract(block)

    def _drop_owner(self, blocks: list[int]) -> None:
        for block in blocks:
            self.tenants.of_block.pop(block, None)
            self.priorities.pop(block, None)

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
