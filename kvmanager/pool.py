"""The verbs of one pool: each is checked whole before it changes anything, so it succeeds whole or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from kvmanager.errors import InvalidArgument, PoolBusy
from kvmanager.promises import Promises
from kvmanager.requests import AppendPlan
from kvmanager.sequence import Sequence
from kvmanager.types import (
    BASE_SCOPE,
    MAX_CHILDREN,
    NO_RETENTION,
    Allocation,
    Append,
    BlockCopy,
    CacheScope,
    ContentSpan,
    FreeOutcome,
    Grant,
    IndexKind,
    Removal,
    Retention,
)
from kvmanager.validation import check_amounts, check_retention, check_scope


class Pool(Promises):
    """The books of one pool.

    Every verb raises InvalidArgument for a request that makes no sense, and leaves the books as they were whenever it
    raises. `caller` is the epoch that a caller speaks for, 0 for people and tools: what a runner has allocated only it
    may change, because only it knows what is being written (NotOwner).

    A verb's copies must be done in their order, before the blocks of its answer or of a later one are written.
    """

    # The verbs of an engine.

    def allocate(
        self,
        sequence_id: str,
        token_ids: Seq[int],
        *,
        scope: CacheScope = BASE_SCOPE,
        spans: Seq[ContentSpan] = (),
        retention: Retention = NO_RETENTION,
        headroom_blocks: int = 0,
        lookahead_tokens: int = 0,
        skip_cache_read: bool = False,
        skip_cache_write: bool = False,
        resumed: bool = False,
        promised_tokens: int = 0,
        caller: int = 0,
    ) -> Allocation:
        """Looks up the cached prefix and allocates blocks for all of `token_ids`, and for `lookahead_tokens` more.

        spans: what stands behind tokens that stand for an image or the like. headroom_blocks must be left over
        afterwards. skip_cache_read hits nothing. skip_cache_write: nothing that it computes can ever be found, so that
        there is nothing to retain either. resumed: the sequence was here before and was preempted, so its lookup does
        not count in the totals. promised_tokens: of the tokens that are not cached, so many or all will be
        computed in the next step, so that their full blocks can be found at once. Raises SequenceExists, NeverFits,
        PinsExhausted, PoolShort.
        """
        self._check_new_id(sequence_id)
        check_amounts(
            headroom_blocks=headroom_blocks, lookahead_tokens=lookahead_tokens, promised_tokens=promised_tokens
        )
        check_retention(retention, skip_cache_write)
        chain = self._chain(token_ids, scope, spans)
        num_tokens = len(chain.token_ids)
        num_blocks = self._blocks_for(num_tokens + lookahead_tokens)
        tenant = self.block_pool.tenants.tenant(scope.salt)
        self._check_fits(sequence_id, num_tokens + lookahead_tokens, num_blocks, tenant)
        self._expire_pins()
        pinned_blocks = num_tokens // self.spec.block_size if retention.pin_seconds else 0
        self._check_pins(pinned_blocks)
        hits: list[int] = [] if skip_cache_read else self._match(chain)
        needed = num_blocks - len(hits) + self._idle(hits)
        self._check_available(needed, headroom_blocks)
        self._check_quota(needed, tenant)

        partial_block, partial_tokens = (0, 0) if skip_cache_read else self._match_inside(chain, hits)
        self.block_pool.hit(hits)
        blocks = hits + self.block_pool.take(num_blocks - len(hits), tenant)
        cached = len(hits) * self.spec.block_size + partial_tokens
        copies = self._copy_partial(partial_block, partial_tokens, blocks[len(hits)])
        publishable = len(hits) if skip_cache_write else self._publishable
        sequence = Sequence(sequence_id, caller, chain, blocks, cached, tenant, retention, publishable)
        sequence.skips_cache_write = skip_cache_write
        sequence.pinned_blocks = pinned_blocks
        self.promised_pins += pinned_blocks
        self.live[sequence_id] = sequence
        self.table_entries += num_blocks
        if promised_tokens:
            self._promise(sequence, promised_tokens)
        if not skip_cache_read and not resumed and self.caches:
            self.totals.queried_tokens += num_tokens
            self.totals.hit_tokens += cached
            self.recent.add(1, num_tokens, cached)
        return Allocation(tuple(blocks), cached, copies)

    def append(self, appends: Seq[Append], *, caller: int = 0) -> list[Grant]:
        """Commits computed tokens, tells new ones and grows the block tables: all of the sequences or none.

        A full block whose tokens are computed can be hit from now on. A block that the sequence will write next and
        that others hold is replaced by a copy. Returns a grant for each sequence whose block table has changed, in
        the order of `appends`. Raises UnknownSequence, NeverFits, PoolShort.
        """
        self._expire_pins()
        grants: list[Grant] = []
        for plan in self._plan_appends(appends, caller):
            self._commit(plan[0], plan[1], plan[2])
            if plan[3] or plan[4]:
                self._grow(plan, grants)
        return grants

    def fork(self, parent_id: str, child_ids: Seq[str], *, caller: int = 0) -> tuple[int, ...]:
        """Makes children that share all blocks of the parent and returns their block table.

        Parent and children must append() before they next write. Raises UnknownSequence, SequenceExists.
        """
        parent = self._owned(parent_id, caller)
        self._check_settles(parent, parent.computed)
        if not 1 <= len(child_ids) <= MAX_CHILDREN:
            raise InvalidArgument(
                f"fork of {parent_id!r} names {len(child_ids)} children; name 1 to {MAX_CHILDREN}",
                children=len(child_ids),
                maximum=MAX_CHILDREN,
            )
        if len(set(child_ids)) < len(child_ids):
            raise InvalidArgument(f"fork of {parent_id!r} names a child twice")
        for child_id in child_ids:
            self._check_new_id(child_id)

        self.block_pool.share(parent.blocks, len(child_ids))
        for child_id in child_ids:
            self.live[child_id] = parent.fork(child_id)
        self.table_entries += len(parent.blocks) * len(child_ids)
        self.totals.forks += len(child_ids)
        return tuple(parent.blocks)

    def truncate(self, sequence_id: str, num_tokens: int, *, caller: int = 0) -> int:
        """Rewinds a sequence to its first `num_tokens` tokens and returns how many blocks its table lost.

        Full blocks behind stay cached. The sequence must append() before it next writes. Raises UnknownSequence.
        """
        sequence = self._owned(sequence_id, caller)
        self._check_settles(sequence, sequence.computed)
        if not 1 <= num_tokens <= sequence.num_tokens:
            raise InvalidArgument(
                f"sequence {sequence_id!r} has {sequence.num_tokens} tokens and can be rewound to 1 to as many, not to "
                f"{num_tokens}",
                num_tokens=num_tokens,
                known_tokens=sequence.num_tokens,
            )
        kept = self._blocks_for(num_tokens)
        dropped = sequence.blocks[kept:]
        sequence.chain.truncate(num_tokens)
        sequence.computed = min(sequence.computed, num_tokens)
        sequence.cached = min(sequence.cached, num_tokens)
        self._limit_pins(sequence, num_tokens // self.spec.block_size)
        self._limit_publishing(sequence, num_tokens // self.spec.block_size)
        del sequence.blocks[kept:]
        self.table_entries -= len(dropped)
        self.block_pool.release(dropped[::-1])
        # The table may have less than `kept` blocks: tokens can be told before there is room for them.
        before = (len(sequence.blocks) - 1) * self.spec.block_size
        self.block_pool.cut(sequence.blocks[-1], max(0, sequence.computed - before))
        return len(dropped)

    def free(self, frees: Seq[Append], *, preempted: bool = False, caller: int = 0) -> FreeOutcome:
        """Commits a last time and ends the sequences. Unknown ones are counted and change nothing.

        preempted: they make room for others and will be back, so that nothing is pinned.
        """
        known = {free.sequence_id: free for free in frees if free.sequence_id in self.live}
        commits = [self._parse_commit(free, caller) for free in known.values()]

        for sequence, token_ids, computed in commits:
            self._commit(sequence, token_ids, computed)
            self._withdraw(sequence)
            if preempted:
                self._limit_pins(sequence, 0)
            self._end(sequence)
        unknown = len({free.sequence_id for free in frees}) - len(known)
        self.totals.unknown_frees += unknown
        return FreeOutcome(len(known), unknown)

    # The verbs of an operator.

    def reset_cache(self) -> int:
        """Forgets every cached block and returns how many. Raises PoolBusy while a sequence lives."""
        if self.live:
            held = self.block_pool.held
            raise PoolBusy(
                f"{len(self.live)} live sequences hold {held} blocks; free them, then reset the cache",
                sequences=len(self.live),
                held_blocks=held,
            )
        return self.block_pool.forget_cached()

    def remove_prefix(
        self, token_ids: Seq[int], scope: CacheScope = BASE_SCOPE, spans: Seq[ContentSpan] = ()
    ) -> Removal:
        """Forgets what is cached of a prompt: the blocks that begin it and all that continue it, pinned or not.

        Blocks that begin other cached prompts too stay, and so do those that live sequences hold, with what they
        continue. A prompt that ends inside a block is taken up to its last full one. O(blocks).
        """
        chain = self._chain(token_ids, scope, spans)
        path = self.block_pool.index.match(chain, len(chain.token_ids) // self.spec.block_size)
        if len(path) < max(1, len(chain.token_ids) // self.spec.block_size):
            return Removal(0, 0)
        family = self._descendants(path[-1])
        removed = 0
        for block in [*reversed(family), *reversed(path)]:
            if not self.block_pool.counts[block] and not self.block_pool.index.num_children(block):
                self.block_pool.remove(block)
                removed += 1
        return Removal(removed, sum(1 for block in [*path, *family] if self.block_pool.counts[block]))

    def set_quota(self, salt: str, blocks: int) -> None:
        """Limits the blocks, held and cached, that the tenant of a salt may occupy; 0 is no limit. O(candidates).

        The empty salt is that of everybody who gives none. What is over the limit already goes when the tenant next
        takes blocks.
        """
        check_scope(CacheScope(salt=salt))
        self._check_quota_size(blocks)
        self.block_pool.apply_quota(self.block_pool.tenants.set_quota(salt, blocks))

    def set_default_quota(self, blocks: int) -> None:
        """Limits each salt that has no quota of its own; 0 is no limit."""
        self._check_quota_size(blocks)
        for tenant in self.block_pool.tenants.set_default(blocks):
            self.block_pool.apply_quota(tenant)

    # Changes: none of these can fail.

    @property
    def _publishable(self) -> int:
        """The first block of a new sequence that can't be published: none, or all without a prefix cache."""
        return 0 if self.spec.index is IndexKind.NONE else self.spec.num_blocks

    def _expire_pins(self) -> None:
        if self.block_pool.pins.until:
            self.block_pool.expire_pins(self.clock())

    def _idle(self, hits: list[int]) -> int:
        """How many of the hits would leave the blocks that can be given up."""
        counts, pinned = self.block_pool.counts, self.block_pool.pins.until
        if pinned:
            return sum([1 for block in hits if not counts[block] and block not in pinned])
        return [counts[block] for block in hits].count(0)

    def _copy_partial(self, source: int, num_tokens: int, target: int) -> tuple[BlockCopy, ...]:
        """The order that fills the block behind the hits; none when that very block was given up for it."""
        if not num_tokens:
            return ()
        self.block_pool.store(target, num_tokens)
        if source == target:
            return ()
        self.totals.copies += 1
        return (BlockCopy(source, target, num_tokens),)

    def _grow(self, plan: AppendPlan, grants: list[Grant]) -> None:
        """Makes the foreign blocks of a plan the sequence's own and adds the rest of what it needs."""
        sequence, _, _, foreign, added, _ = plan
        size, blocks = self.spec.block_size, self.block_pool
        first = len(sequence.blocks)
        copies: list[BlockCopy] = []
        for index in foreign:
            block = sequence.blocks[index]
            if blocks.counts[block] == 1 and blocks.can_unpublish(block):
                blocks.unpublish(block, max(0, sequence.computed - index * size))
            else:
                first = min(first, index)
                copies += self._replace_shared(sequence, index)
        if added:
            sequence.blocks += blocks.take(added, sequence.tenant)
            self.table_entries += added
        if first < len(sequence.blocks):
            grants.append(Grant(sequence.sequence_id, first, tuple(sequence.blocks[first:]), tuple(copies)))

    def _replace_shared(self, sequence: Sequence, index: int) -> list[BlockCopy]:
        """Copy-on-write of one table entry; no order when the block holds nothing that would have to be copied."""
        source, target = sequence.blocks[index], self.block_pool.take(1, sequence.tenant)[0]
        sequence.blocks[index] = target
        self.block_pool.release([source])
        num_tokens = min(self.spec.block_size, sequence.computed - index * self.spec.block_size)
        if num_tokens <= 0:
            return []
        self.block_pool.store(target, num_tokens)
        self.totals.copies += 1
        return [BlockCopy(source, target, num_tokens)]

    def _commit(self, sequence: Sequence, token_ids: array[int], computed: int) -> None:
        sequence.chain.token_ids.extend(token_ids)
        self._advance(sequence, computed)

    def _advance(self, sequence: Sequence, computed: int) -> None:
        """So many tokens of a sequence are computed now."""
        if computed == sequence.computed:
            return
        size = self.spec.block_size
        first, last = sequence.computed // size, computed // size
        sequence.computed = computed
        if first < last:
            self._commit_full(sequence, first, last)
            if sequence.promised_blocks:
                self._keep(sequence)
        if computed % size:
            self.block_pool.store(sequence.blocks[last], computed % size)

    def _commit_full(self, sequence: Sequence, first: int, last: int) -> None:
        """Publishes the blocks at indices first..last-1, which are full now."""
        published = first
        if first < sequence.publishable:
            end = min(last, sequence.publishable)
            published = self.block_pool.publish(sequence.blocks, sequence.chain, first, end)
            if published < end:
                sequence.publishable = published
        for index in range(published, last):
            self.block_pool.store(sequence.blocks[index], self.spec.block_size)

    def _end(self, sequence: Sequence) -> None:
        retention = sequence.retention
        if retention.priority or sequence.pinned_blocks:
            until = self.clock() + retention.pin_seconds
            self.block_pool.retain(sequence.blocks, retention.priority, sequence.pinned_blocks, until)
            self._limit_pins(sequence, 0)
        # Last block first, so that the beginning of a chain outlives its end in the cache.
        self.block_pool.release(sequence.blocks[::-1])
        self.table_entries -= len(sequence.blocks)
        # Whoever still knows it finds no blocks of it.
        sequence.blocks = []
        del self.live[sequence.sequence_id]

    def _limit_pins(self, sequence: Sequence, full_blocks: int) -> None:
        """A sequence pins no more than `full_blocks` blocks when it ends."""
        if sequence.pinned_blocks > full_blocks:
            self.promised_pins -= sequence.pinned_blocks - full_blocks
            sequence.pinned_blocks = full_blocks

    def _limit_publishing(self, sequence: Sequence, kept_blocks: int) -> None:
        """What follows the first `kept_blocks` full blocks is written anew: under new names, or under none."""
        if sequence.skips_cache_write:
            sequence.publishable = min(sequence.publishable, kept_blocks)
        elif kept_blocks <= sequence.publishable:
            sequence.publishable = self._publishable

    def _check_quota_size(self, blocks: int) -> None:
        if not 0 <= blocks <= self.spec.usable_blocks:
            raise InvalidArgument(
                f"a quota is 0 (no limit) to {self.spec.usable_blocks} blocks, all of the pool, not {blocks}",
                quota_blocks=blocks,
                maximum=self.spec.usable_blocks,
            )
