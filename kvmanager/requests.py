"""What is checked before a verb changes anything: ownership, capacity, and what an append will need."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from kvmanager.errors import InvalidArgument, NeverFits, NotOwner, PinsExhausted, PoolShort, QuotaShort, SequenceExists
from kvmanager.ledger import Ledger
from kvmanager.sequence import Sequence
from kvmanager.tenants import Tenant
from kvmanager.types import Append
from kvmanager.validation import check_id, parse_token_ids

Commit = tuple[Sequence, "array[int]", int]
"""A sequence, its new tokens, and how many tokens are computed now."""

AppendPlan = tuple[Sequence, "array[int]", int, list[int], int, int]
"""A commit; the indices of the table entries that will be written and aren't the sequence's own; how many blocks the
table grows by; and how many blocks that takes, copies included."""


class Requests(Ledger):
    """The checks of a pool. Each raises, or returns what the verb then carries out; none changes anything."""

    def _check_new_id(self, sequence_id: str) -> None:
        check_id("a sequence id", sequence_id)
        if sequence_id in self.live:
            raise SequenceExists(
                f"sequence {sequence_id!r} lives already; free it first or take another id", sequence_id=sequence_id
            )

    def _check_fits(self, sequence_id: str, num_tokens: int, num_blocks: int, tenant: Tenant) -> None:
        usable, whose = self.spec.usable_blocks, "the pool has"
        if 0 < tenant.quota < usable:
            usable, whose = tenant.quota, "the quota of its salt is"
        if num_blocks > usable:
            raise NeverFits(
                f"sequence {sequence_id!r} of {num_tokens} tokens needs {num_blocks} blocks of {self.spec.block_size}, "
                f"and {whose} {usable} usable: at most {usable * self.spec.block_size} tokens fit",
                num_tokens=num_tokens,
                needed_blocks=num_blocks,
                usable_blocks=usable,
                maximum_tokens=usable * self.spec.block_size,
            )

    def _check_available(self, needed: int, headroom: int) -> None:
        """Refuses when the pool can't give `needed` blocks now, those that a hit wakes included."""
        available = self.block_pool.available
        if needed and needed + headroom > available:
            left = f" with {headroom} left over" if headroom else ""
            self.totals.allocation_failures += 1
            raise PoolShort(
                f"{needed} blocks are needed{left}, {available} are free or cached; retry when sequences have ended",
                needed_blocks=needed,
                headroom_blocks=headroom,
                available_blocks=available,
            )

    def _check_quota(self, needed: int, tenant: Tenant) -> None:
        """Refuses when the tenant's quota leaves less than `needed` blocks now."""
        if tenant.quota and needed > tenant.room:
            self.totals.allocation_failures += 1
            self.totals.quota_failures += 1
            raise QuotaShort(
                f"{needed} blocks are needed, and the salt's quota of {tenant.quota} leaves {tenant.room} beside the "
                f"{tenant.held} held and {tenant.pinned} pinned ones; retry when its sequences have ended",
                needed_blocks=needed,
                available_blocks=tenant.room,
                quota_blocks=tenant.quota,
            )

    def _check_pins(self, pinned_blocks: int) -> None:
        limit = self.spec.usable_blocks // 2
        pinned = len(self.block_pool.pins.until) + self.promised_pins
        if pinned_blocks and pinned + pinned_blocks > limit:
            self.totals.allocation_failures += 1
            self.totals.pin_failures += 1
            raise PinsExhausted(
                f"{pinned_blocks} blocks are to be pinned, {pinned} are already, and at most {limit} may be, half of "
                "the pool; pin less, or retry when pins have run out",
                pinned_blocks=pinned,
                needed_blocks=pinned_blocks,
                maximum=limit,
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

    def _parse_commit(self, append: Append, caller: int) -> Commit:
        sequence = self._owned(append.sequence_id, caller)
        token_ids = parse_token_ids(append.token_ids)
        told = sequence.num_tokens
        known = told + len(token_ids)
        computed = append.computed_tokens or sequence.computed
        room = len(sequence.blocks) * self.spec.block_size
        if computed < sequence.computed or computed > known or computed > room:
            raise InvalidArgument(
                f"sequence {append.sequence_id!r} has {sequence.computed} computed tokens, {known} known and room for "
                f"{room} in its blocks: computed_tokens {computed} must be from the first to the least of the others",
                computed_tokens=computed,
                known_tokens=known,
                block_tokens=room,
            )
        if computed > told:
            self._check_own_writes(sequence, told, computed)
        return sequence, token_ids, computed

    def _check_settles(self, sequence: Sequence, computed: int) -> None:
        """Refuses a word about a sequence that leaves some of what it promised uncomputed; a Free may."""
        promised = sequence.promised_blocks * self.spec.block_size
        if computed < promised:
            raise InvalidArgument(
                f"sequence {sequence.sequence_id!r} has promised to compute its first {promised} tokens, and "
                f"{computed} are; commit them by an append, or free the sequence",
                computed_tokens=computed,
                promised_tokens=promised,
            )

    def _check_own_writes(self, sequence: Sequence, told: int, computed: int) -> None:
        """Refuses tokens told as computed at once in a block that others hold or may hit: all would read them.

        Tokens told before may be committed in a shared block: they were computed before the fork, for all.
        """
        blocks = self.block_pool
        for index in range(told // self.spec.block_size, self._blocks_for(computed)):
            block = sequence.blocks[index]
            if blocks.counts[block] > 1 or blocks.index.names[block]:
                raise InvalidArgument(
                    f"sequence {sequence.sequence_id!r} says that it computed tokens in block {block}, which "
                    f"{blocks.counts[block]} block tables name and later prompts may hit; after a fork or a truncate, "
                    "append before the next write",
                    computed_tokens=computed,
                    block=block,
                )

    def _plan_appends(self, appends: Seq[Append], caller: int) -> list[AppendPlan]:
        if len(appends) > 1 and len({append.sequence_id for append in appends}) < len(appends):
            raise InvalidArgument("an append names a sequence twice; put all its tokens into one entry")
        given_up: dict[int, int] = {}
        withdrawn: dict[bytes, int] = {}
        plans = [self._plan_append(append, caller, given_up, withdrawn) for append in appends]
        self._check_plans(plans)
        return plans

    def _plan_append(
        self, append: Append, caller: int, given_up: dict[int, int], withdrawn: dict[bytes, int]
    ) -> AppendPlan:
        """Plans one append. What earlier plans of the call take away is counted in `given_up`, the holders of a block,
        and in `withdrawn`, the blocks of a name."""
        sequence, token_ids, computed = self._parse_commit(append, caller)
        self._check_settles(sequence, computed)
        num_tokens = sequence.num_tokens + len(token_ids)
        room = num_tokens + append.lookahead_tokens
        if append.lookahead_tokens < 0:
            raise InvalidArgument(
                f"lookahead_tokens is {append.lookahead_tokens}; use 0 or more",
                lookahead_tokens=append.lookahead_tokens,
            )
        added = max(0, self._blocks_for(room) - len(sequence.blocks))
        if added:
            self._check_fits(append.sequence_id, room, self._blocks_for(room), sequence.tenant)
        foreign: list[int] = []
        copies = 0
        if computed < room:
            foreign, copies = self._foreign_writes(sequence, computed, given_up, withdrawn)
        return sequence, token_ids, computed, foreign, added, added + copies

    def _foreign_writes(
        self, sequence: Sequence, computed: int, given_up: dict[int, int], withdrawn: dict[bytes, int]
    ) -> tuple[list[int], int]:
        """Indices of the blocks that will be written from position `computed` on and that others hold or may hit.

        And how many of them need a copy; the others can be taken out of the index.
        """
        counts, names = self.block_pool.counts, self.block_pool.index.names
        foreign: list[int] = []
        copies = 0
        for place in range(computed // self.spec.block_size, len(sequence.blocks)):
            block = sequence.blocks[place]
            if counts[block] > 1 and counts[block] - given_up.get(block, 0) > 1:
                given_up[block] = given_up.get(block, 0) + 1
                foreign.append(place)
                copies += 1
            elif names[block]:
                gone = withdrawn.get(names[block], 0)
                foreign.append(place)
                if self.block_pool.can_unpublish(block, gone):
                    withdrawn[names[block]] = gone + 1
                else:
                    copies += 1
        return foreign, copies

    def _check_plans(self, plans: list[AppendPlan]) -> None:
        total = 0
        by_tenant: dict[str, int] = {}
        for sequence, _, _, _, _, needed in plans:
            total += needed
            if needed and sequence.tenant.quota:
                by_tenant[sequence.tenant.salt] = by_tenant.get(sequence.tenant.salt, 0) + needed
        self._check_available(total, 0)
        for salt, needed in by_tenant.items():
            self._check_quota(needed, self.block_pool.tenants.tenant(salt))
