"""The verbs of one pool: each is checked whole before it changes anything, so it succeeds whole or not at all."""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvmanager.blocks import BlockPool
from kvmanager.check import check_pool
from kvmanager.errors import (
    InvalidArgument,
    NeverFits,
    NotOwner,
    PoolBusy,
    PoolShort,
    SequenceExists,
    UnknownSequence,
)
from kvmanager.eviction import LruEviction
from kvmanager.hashing import HashChain
from kvmanager.prefix_index import HashIndex
from kvmanager.sequence import Sequence
from kvmanager.types import (
    BASE_SCOPE,
    MAX_CHILDREN,
    Allocation,
    Append,
    BlockCopy,
    BlockView,
    CacheScope,
    CheckReport,
    FreeOutcome,
    Grant,
    Hit,
    Occupancy,
    PoolSpec,
    SequenceView,
    Totals,
)
from kvmanager.validation import check_id, check_scope, check_spec, parse_token_ids


@dataclass(frozen=True, slots=True)
class _AppendPlan:
    """What an append will do: the copies it needs, as block-table indices, and the fresh blocks it adds."""

    sequence: Sequence
    token_ids: array[int]
    computed: int
    copied_indices: tuple[int, ...]
    added_blocks: int

    @property
    def needed_blocks(self) -> int:
        return len(self.copied_indices) + self.added_blocks


class Pool:
    """The books of one pool. Not thread-safe: one owner calls it.

    Every verb raises InvalidArgument for a request that makes no sense, and leaves the books as they were whenever it
    raises. `caller` is the epoch that a caller speaks for, 0 for people and tools: what a runner has allocated only it
    may change, because only it knows what is being written (NotOwner).
    """

    def __init__(self, spec: PoolSpec) -> None:
        check_spec(spec)
        self.spec = spec
        self.totals = Totals()
        self.block_pool = BlockPool(
            spec.num_blocks, spec.block_size, LruEviction(spec.num_blocks), HashIndex(), self.totals
        )
        self.live: dict[str, Sequence] = {}
        self.table_entries = 0
        """Entries of all block tables; equals the sum of all counts."""

    # The verbs of an engine.

    def allocate(
        self,
        sequence_id: str,
        token_ids: Seq[int],
        *,
        scope: CacheScope = BASE_SCOPE,
        headroom_blocks: int = 0,
        skip_cache_read: bool = False,
        resumed: bool = False,
        caller: int = 0,
    ) -> Allocation:
        """Looks up the cached prefix and allocates blocks for all of `token_ids`.

        headroom_blocks must be left over afterwards. skip_cache_read hits nothing. resumed: the sequence was here
        before and was preempted, so its lookup does not count in the totals. Raises SequenceExists, NeverFits,
        PoolShort.
        """
        self._check_new_id(sequence_id)
        chain = self._chain(token_ids, scope)
        if headroom_blocks < 0:
            raise InvalidArgument(f"headroom_blocks is {headroom_blocks}; use 0 or more")
        num_tokens = len(chain.token_ids)
        num_blocks = self._blocks_for(num_tokens)
        self._check_fits(sequence_id, num_tokens, num_blocks)
        hits = [] if skip_cache_read else self._match(chain)
        idle_hits = sum(1 for block in hits if not self.block_pool.counts[block])
        self._check_available(num_blocks - len(hits) + idle_hits, headroom_blocks)

        for block in hits:
            self.block_pool.share(block)
        blocks = hits + [self.block_pool.take() for _ in range(num_blocks - len(hits))]
        cached = len(hits) * self.spec.block_size
        self.live[sequence_id] = Sequence(sequence_id, caller, chain, blocks, cached, cached)
        self.table_entries += num_blocks
        if not skip_cache_read and not resumed:
            self.totals.queried_tokens += num_tokens
            self.totals.hit_tokens += cached
        return Allocation(tuple(blocks), cached)

    def append(self, appends: Seq[Append], *, caller: int = 0) -> list[Grant]:
        """Commits computed tokens, tells new ones and grows the block tables: all of the sequences or none.

        A full block whose tokens are computed can be hit from now on. A shared block that the sequence will write
        next is replaced by a copy. Raises UnknownSequence, NeverFits, PoolShort.
        """
        plans = self._plan_appends(appends, caller)
        self._check_available(sum(plan.needed_blocks for plan in plans), 0)
        return [self._apply_append(plan) for plan in plans]

    def fork(self, parent_id: str, child_ids: Seq[str], *, caller: int = 0) -> tuple[int, ...]:
        """Makes children that share all blocks of the parent and returns their block table.

        Parent and children must append() before they next write. Raises UnknownSequence, SequenceExists.
        """
        parent = self._owned(parent_id, caller)
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

        for block in parent.blocks:
            self.block_pool.share(block, len(child_ids))
        for child_id in child_ids:
            self.live[child_id] = parent.fork(child_id)
        self.table_entries += len(parent.blocks) * len(child_ids)
        self.totals.forks += len(child_ids)
        return tuple(parent.blocks)

    def free(self, frees: Seq[Append], *, caller: int = 0) -> FreeOutcome:
        """Commits a last time and ends the sequences. Unknown ones are counted and change nothing."""
        known = {free.sequence_id: free for free in frees if free.sequence_id in self.live}
        commits = [self._parse_commit(free, caller) for free in known.values()]

        for sequence, token_ids, computed in commits:
            self._commit(sequence, token_ids, computed)
            self._end(sequence)
        unknown = len({free.sequence_id for free in frees}) - len(known)
        self.totals.unknown_frees += unknown
        return FreeOutcome(len(known), unknown)

    # The verbs of an operator.

    def lookup(self, token_ids: Seq[int], scope: CacheScope = BASE_SCOPE) -> Hit:
        """What allocate() would find cached now. Changes nothing."""
        hits = self._match(self._chain(token_ids, scope))
        return Hit(tuple(hits), len(hits) * self.spec.block_size)

    def sequence(self, sequence_id: str) -> Sequence:
        """The live sequence. Raises UnknownSequence."""
        try:
            return self.live[sequence_id]
        except KeyError:
            raise UnknownSequence(
                f"no live sequence {sequence_id!r} among {len(self.live)}; it has ended or never began",
                sequence_id=sequence_id,
                sequences=len(self.live),
            ) from None

    def block_table(self, sequence_id: str) -> tuple[SequenceView, list[BlockView]]:
        """The sequence and its blocks in order. Raises UnknownSequence."""
        sequence = self.sequence(sequence_id)
        size = self.spec.block_size
        views = [
            BlockView(
                block,
                self.block_pool.counts[block],
                self.block_pool.names[block] or b"",
                min(size, max(0, sequence.computed - index * size)),
            )
            for index, block in enumerate(sequence.blocks)
        ]
        return sequence.view(), views

    def sequences(self, after: str = "", limit: int = 100) -> list[SequenceView]:
        """The first `limit` live sequences by id whose ids come after `after`."""
        ids = sorted(self.live)
        start = bisect.bisect_right(ids, after)
        return [self.live[sequence_id].view() for sequence_id in ids[start : start + limit]]

    def occupancy(self) -> Occupancy:
        """Blocks by state, and tokens; O(1)."""
        blocks = self.block_pool
        return Occupancy(
            usable_blocks=blocks.usable,
            free_blocks=len(blocks.free),
            cached_blocks=len(blocks.cached),
            held_blocks=blocks.held,
            shared_blocks=blocks.shared,
            stored_tokens=blocks.stored_tokens,
            reserved_tokens=blocks.held * self.spec.block_size,
            sequences=len(self.live),
        )

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

    def check(self) -> CheckReport:
        """Recomputes everything that is derived and compares; O(blocks + table entries)."""
        violations = check_pool(self.block_pool, self.live, self.table_entries)
        return CheckReport(tuple(violations), self.spec.num_blocks, len(self.live))

    def imbalance(self) -> int:
        """How far the sums are off: free + cached + held against usable, and counts against table entries; O(1)."""
        blocks = self.block_pool
        states = len(blocks.free) + len(blocks.cached) + blocks.held
        return abs(states - blocks.usable) + abs(blocks.references - self.table_entries)

    # Checks: none of these changes anything.

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _chain(self, token_ids: Seq[int], scope: CacheScope) -> HashChain:
        check_scope(scope)
        tokens = parse_token_ids(token_ids)
        if not tokens:
            raise InvalidArgument("the prompt has no tokens; it needs at least 1", num_tokens=0)
        return HashChain(tokens, self.spec.block_size, scope)

    def _match(self, chain: HashChain) -> list[int]:
        # The last token is always computed: its logits are what the caller is after.
        return self.block_pool.index.match(chain, (len(chain.token_ids) - 1) // self.spec.block_size)

    def _check_new_id(self, sequence_id: str) -> None:
        check_id("a sequence id", sequence_id)
        if sequence_id in self.live:
            raise SequenceExists(
                f"sequence {sequence_id!r} lives already; free it first or take another id", sequence_id=sequence_id
            )

    def _check_fits(self, sequence_id: str, num_tokens: int, num_blocks: int) -> None:
        usable = self.spec.usable_blocks
        if num_blocks > usable:
            raise NeverFits(
                f"sequence {sequence_id!r} of {num_tokens} tokens needs {num_blocks} blocks of {self.spec.block_size}, "
                f"and the pool has {usable} usable: at most {usable * self.spec.block_size} tokens fit",
                num_tokens=num_tokens,
                needed_blocks=num_blocks,
                usable_blocks=usable,
                maximum_tokens=usable * self.spec.block_size,
            )

    def _check_available(self, needed: int, headroom: int) -> None:
        available = self.block_pool.available
        if needed and needed + headroom > available:
            self.totals.allocation_failures += 1
            left = f" with {headroom} left over" if headroom else ""
            raise PoolShort(
                f"{needed} blocks are needed{left}, {available} are free or cached; retry when sequences have ended",
                needed_blocks=needed,
                headroom_blocks=headroom,
                available_blocks=available,
            )

    def _owned(self, sequence_id: str, caller: int) -> Sequence:
        sequence = self.sequence(sequence_id)
        if sequence.owner and sequence.owner != caller:
            raise NotOwner(
                f"sequence {sequence_id!r} belongs to the runner of epoch {sequence.owner}, which may be writing its "
                f"blocks; the caller speaks for epoch {caller}",
                sequence_id=sequence_id,
                epoch=sequence.owner,
                caller_epoch=caller,
            )
        return sequence

    def _parse_commit(self, append: Append, caller: int) -> tuple[Sequence, array[int], int]:
        sequence = self._owned(append.sequence_id, caller)
        token_ids = parse_token_ids(append.token_ids)
        computed = append.computed_tokens or sequence.computed
        known = sequence.num_tokens + len(token_ids)
        room = len(sequence.blocks) * self.spec.block_size
        if not sequence.computed <= computed <= min(known, room):
            raise InvalidArgument(
                f"sequence {append.sequence_id!r} has {sequence.computed} computed tokens, {known} known and room for "
                f"{room} in its blocks: computed_tokens {computed} must be from the first to the least of the others",
                computed_tokens=computed,
                known_tokens=known,
                block_tokens=room,
            )
        self._check_own_writes(sequence, computed)
        return sequence, token_ids, computed

    def _check_own_writes(self, sequence: Sequence, computed: int) -> None:
        """Refuses tokens that are told as computed at once, in a block with another holder: it was written for both.

        Tokens known before may be committed in a shared block: they were computed before the fork, for all.
        """
        if computed <= sequence.num_tokens:
            return
        for index in range(sequence.num_tokens // self.spec.block_size, self._blocks_for(computed)):
            block = sequence.blocks[index]
            if self.block_pool.counts[block] > 1:
                raise InvalidArgument(
                    f"sequence {sequence.sequence_id!r} says that it computed tokens in block {block}, which "
                    f"{self.block_pool.counts[block]} block tables name; after a fork, append before the next write",
                    computed_tokens=computed,
                    block=block,
                )

    def _plan_appends(self, appends: Seq[Append], caller: int) -> list[_AppendPlan]:
        if len({append.sequence_id for append in appends}) < len(appends):
            raise InvalidArgument("an append names a sequence twice; put all its tokens into one entry")
        given_up: dict[int, int] = {}
        return [self._plan_append(append, caller, given_up) for append in appends]

    def _plan_append(self, append: Append, caller: int, given_up: dict[int, int]) -> _AppendPlan:
        """Plans one append; `given_up` counts, by block, the holders that earlier plans of the call take away."""
        sequence, token_ids, computed = self._parse_commit(append, caller)
        num_tokens = sequence.num_tokens + len(token_ids)
        num_blocks = self._blocks_for(num_tokens)
        self._check_fits(append.sequence_id, num_tokens, num_blocks)
        copied = tuple(self._shared_writes(sequence, computed, given_up)) if computed < num_tokens else ()
        return _AppendPlan(sequence, token_ids, computed, copied, max(0, num_blocks - len(sequence.blocks)))

    def _shared_writes(self, sequence: Sequence, computed: int, given_up: dict[int, int]) -> Iterable[int]:
        """Indices of the blocks that will be written from position `computed` on and have another holder."""
        for index in range(computed // self.spec.block_size, len(sequence.blocks)):
            block = sequence.blocks[index]
            if self.block_pool.counts[block] - given_up.get(block, 0) > 1:
                given_up[block] = given_up.get(block, 0) + 1
                yield index

    # Changes: none of these can fail.

    def _apply_append(self, plan: _AppendPlan) -> Grant:
        sequence = plan.sequence
        self._commit(sequence, plan.token_ids, plan.computed)
        first = min(plan.copied_indices, default=len(sequence.blocks))
        copies = [copy for index in plan.copied_indices if (copy := self._replace_shared(sequence, index)) is not None]
        sequence.blocks += [self.block_pool.take() for _ in range(plan.added_blocks)]
        self.table_entries += plan.added_blocks
        return Grant(sequence.sequence_id, first, tuple(sequence.blocks[first:]), tuple(copies))

    def _replace_shared(self, sequence: Sequence, index: int) -> BlockCopy | None:
        """Copy-on-write of one table entry; None when the block holds nothing that would have to be copied."""
        source, target = sequence.blocks[index], self.block_pool.take()
        sequence.blocks[index] = target
        self.block_pool.release(source)
        num_tokens = min(self.spec.block_size, sequence.computed - index * self.spec.block_size)
        if num_tokens <= 0:
            return None
        self.block_pool.store(target, num_tokens)
        self.totals.copies += 1
        return BlockCopy(source, target, num_tokens)

    def _commit(self, sequence: Sequence, token_ids: array[int], computed: int) -> None:
        size = self.spec.block_size
        sequence.chain.token_ids.extend(token_ids)
        for index in range(sequence.computed // size, self._blocks_for(computed)):
            block = sequence.blocks[index]
            self.block_pool.store(block, min(size, computed - index * size))
            if (index + 1) * size <= computed:
                self.block_pool.publish(block, sequence.chain.name(index))
        sequence.computed = computed

    def _end(self, sequence: Sequence) -> None:
        # Last block first, so that the beginning of a chain outlives its end in the cache.
        for block in reversed(sequence.blocks):
            self.block_pool.release(block)
        self.table_entries -= len(sequence.blocks)
        del self.live[sequence.sequence_id]
