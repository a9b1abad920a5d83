"""The verbs that a runner speaks in a session: what it did is written down, what it asks for is granted or refused."""

from __future__ import annotations

from array import array
from itertools import compress
from typing import NamedTuple

from kvmanager.clock import Clock, no_time
from kvmanager.errors import InvalidArgument, KvError, NeverFits, PoolShort, QuotaShort
from kvmanager.events import EventLog
from kvmanager.news import News, NewsRow
from kvmanager.restore import RestorablePool
from kvmanager.sequence import Sequence
from kvmanager.types import Append, Grant, PoolSpec

Refused = tuple[Sequence, KvError]
"""A sequence whose ask was refused, and why."""

Answers = tuple[list[Grant], list[Refused]]

_NO_TOKENS = array("I")


class _Ask(NamedTuple):
    """A sequence that asks: the tokens that it wants room for, and how many are computed, when all is told."""

    sequence: Sequence
    room: int
    computed: int


class RunnerPool(RestorablePool):
    """A pool with a lease. The lease's blocks count as those of who gives no salt until a sequence takes them.

    Most of what a runner tells has no part in the answer to what it asks. So answer() may leave it for settle(), which
    is due before any other verb. The books are whole in between; they don't know the news yet.
    """

    def __init__(self, spec: PoolSpec, clock: Clock = no_time, events: EventLog | None = None) -> None:
        super().__init__(spec, clock, events)
        self._told: News | None = None
        """What settle() writes down."""

    def progress(self, news: News, *, ending: bool = False) -> Answers:
        """Commits what was computed and taken, all of it, and then grants what is asked for, one sequence at a time.

        Blocks that were taken replace what the table has behind the entries that the runner knows. A sequence may so
        come to be over its quota. ending: these are their last news, so that promised tokens may be left uncomputed.
        Raises InvalidArgument, and changes nothing, when what is told can't be true.
        """
        self.settle()
        self._expire_pins()
        asks = _asks(news)
        self._write_down(news, ending)
        return self._answer_asks(asks)

    def answer(self, news: News) -> Answers:
        """The answer of progress(), before all is written down: settle() is due then. Raises InvalidArgument."""
        if news.taken:
            return self.progress(news)
        self.settle()
        self._expire_pins()
        self._told = news
        return self._answer_asks(_asks(news))

    def settle(self) -> None:
        """Writes down what the last answer() has left. Again: nothing.

        Raises InvalidArgument, and writes nothing of it down, when it can't be true: then what was granted was granted
        to a runner that holds something else than its books say, and its session has to end.
        """
        news, self._told = self._told, None
        if news is not None:
            self._write_down(news)

    def fill_lease(self, wanted: int) -> list[int]:
        """Fills the lease up to `wanted` blocks, as long as so many stay for others. Returns the new ones."""
        self._expire_pins()
        base = self.block_pool.tenants.base
        count = min(wanted - len(self.lease), self.block_pool.available - wanted)
        if base.quota:
            count = min(count, base.room)
        if count <= 0:
            return []
        if base.quota or count > len(self.block_pool.free):
            # What is given up for it is known when all is written down.
            self.settle()
        blocks = self.block_pool.take(count, base)
        self.lease.add(blocks)
        self.table_entries += count
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        """Takes blocks of the lease back. Raises InvalidArgument, and changes nothing, for one that is not in it."""
        self._check_leased(blocks)
        self.lease.remove(blocks)
        self.table_entries -= len(blocks)
        self.block_pool.release(blocks)

    def end_runner(self, caller: int) -> int:
        """Ends all sequences of a runner, takes its lease back, and returns how many sequences they were.

        What it computed stays cached as far as it was committed; nothing is pinned.
        """
        gone = [Append(key) for key, sequence in self.live.items() if sequence.owner == caller]
        self.free(gone, preempted=True, caller=caller)
        self.give_back(self.lease.members())
        return len(gone)

    def listen(self) -> None:
        """Notes from now on which blocks can be hit no more."""
        self.block_pool.forgotten = set()

    def stop_listening(self) -> None:
        """Notes that no longer."""
        self.block_pool.forgotten = None

    def take_forgotten(self) -> list[int]:
        """The blocks that can be hit no more, since the last call."""
        forgotten, names = self.block_pool.forgotten, self.block_pool.index.names
        if not forgotten:
            return []
        self.block_pool.forgotten = set()
        return [block for block in forgotten if not names[block]]

    def _write_down(self, news: News, ending: bool = False) -> None:
        """Commits what was computed and taken. Raises InvalidArgument, and changes nothing."""
        tails, others = self._sort_news(news)
        rows = news.rows(others)
        self._check_rows(rows, ending)
        if len(set(news.sequences)) < len(news.sequences):
            raise InvalidArgument("a sequence is named twice; put all its news into one entry")
        news.tell()
        for row in rows:
            self._commit_row(row)
        self._commit_tails(news, tails, others)

    def _sort_news(self, news: News) -> tuple[list[int], list[int]]:
        """Parts the plain rows from the others: of the plain ones the block that each computed into, of the others
        their places.

        A plain row says that tokens which were told before are computed now, in a block of the sequence that they don't
        fill. That can't be wrong, and in decode most rows are so. A sequence that has ended has no blocks.
        """
        size = self.spec.block_size
        tails: list[int] = []
        others: list[int] = []
        for sequence, computed, taken in zip(news.sequences, news.computed, news.taken_counts, strict=True):
            before, blocks, index = sequence.computed, sequence.blocks, computed // size
            if (
                before < computed <= len(sequence.chain.token_ids)
                and computed ^ before < size
                and index < len(blocks)
                and not taken
                and not sequence.promised_blocks
            ):
                tails.append(blocks[index])
            else:
                others.append(len(tails) + len(others))
        return tails, others

    def _check_rows(self, rows: list[NewsRow], ending: bool) -> None:
        """Refuses what can't be true of one sequence, and blocks that are not in the lease."""
        all_taken: list[int] = []
        for row in rows:
            self._check_row(row)
            all_taken.extend(row.taken)
            if row.sequence.promised_blocks and not ending:
                self._check_settles(row.sequence, row.computed)
        self._check_leased(all_taken)

    def _check_row(self, row: NewsRow) -> None:
        sequence, new, computed, entries, taken = row
        if self.live.get(sequence.sequence_id) is not sequence:
            raise InvalidArgument(f"sequence {sequence.sequence_id!r} has ended", sequence_id=sequence.sequence_id)
        size = self.spec.block_size
        told, own = len(sequence.chain.token_ids), len(sequence.blocks)
        if taken:
            own = self._check_entries(sequence, entries)
        known, room = told + new, (own + len(taken)) * size
        if computed < sequence.computed or computed > known or computed > room:
            raise InvalidArgument(
                f"sequence {sequence.sequence_id!r} has {sequence.computed} computed tokens, {known} known and "
                f"room for {room} in its blocks: computed_tokens {computed} must be from the first to the least of "
                "the others",
                computed_tokens=computed,
                known_tokens=known,
                block_tokens=room,
            )
        if computed > told:
            self._check_own_writes(sequence, told, min(computed, own * size))
        if computed // size > sequence.computed // size:
            self._check_names(sequence, min(computed, told) // size)

    def _commit_row(self, row: NewsRow) -> None:
        """Writes down what was taken and computed; new tokens are told already."""
        if row.taken:
            self._replace_end(row.sequence, row.entries, row.taken)
        self._advance(row.sequence, row.computed)

    def _commit_tails(self, news: News, tails: list[int], others: list[int]) -> None:
        """Writes down what was computed in plain rows, whose blocks are `tails`: all others than `others`."""
        is_plain = bytearray(b"\1") * len(news.sequences)
        for place in others:
            is_plain[place] = 0
        computed = list(compress(news.computed, is_plain))
        for sequence, now in zip(compress(news.sequences, is_plain), computed, strict=True):
            sequence.computed = now
        inside = self.spec.block_size - 1
        self.block_pool.store_tails(tails, [now & inside for now in computed])

    def _check_names(self, sequence: Sequence, last: int) -> None:
        """Refuses to fill blocks before index `last` that hold something else: it was written without an ask."""
        names = self.block_pool.index.names
        for index in range(sequence.computed // self.spec.block_size, min(last, len(sequence.blocks))):
            name = names[sequence.blocks[index]]
            if name and name != sequence.chain.name(index):
                raise InvalidArgument(
                    f"sequence {sequence.sequence_id!r} says that it computed tokens in block "
                    f"{sequence.blocks[index]}, which holds others; after a fork or a truncate, ask before the next "
                    "write",
                    block=sequence.blocks[index],
                )

    def _check_entries(self, sequence: Sequence, entries: int) -> int:
        """Refuses blocks behind a table that the sequence doesn't have, or in the place of what is computed."""
        if not self._blocks_for(sequence.computed) <= entries <= len(sequence.blocks):
            raise InvalidArgument(
                f"sequence {sequence.sequence_id!r} has {len(sequence.blocks)} blocks and {sequence.computed} computed "
                f"tokens: blocks of the lease can't follow its first {entries}",
                blocks=len(sequence.blocks),
                computed_tokens=sequence.computed,
                entries=entries,
            )
        return entries

    def _check_leased(self, blocks: list[int]) -> None:
        if blocks and (strangers := self.lease.strangers(blocks)):
            raise InvalidArgument(
                f"block {strangers[0]} is not in the lease of {len(self.lease)} blocks, or is named twice",
                block=strangers[0],
                leased_blocks=len(self.lease),
            )

    def _replace_end(self, sequence: Sequence, entries: int, taken: array[int]) -> None:
        """Blocks of the lease follow the first `entries` of a table. They stay held, by one holder each."""
        unknown = sequence.blocks[entries:]
        if unknown:
            del sequence.blocks[entries:]
            self.table_entries -= len(unknown)
            self.block_pool.release(unknown[::-1])
        self.lease.remove(taken)
        sequence.blocks.extend(taken)
        tenants = self.block_pool.tenants
        tenants.base.used -= len(taken)
        sequence.tenant.used += len(taken)
        if sequence.tenant.salt:
            tenants.of_block.update(dict.fromkeys(taken, sequence.tenant))

    def _answer_asks(self, asks: list[_Ask]) -> Answers:
        grants: list[Grant] = []
        refused: list[Refused] = []
        for ask in asks:
            try:
                self._answer_ask(ask, grants)
            except (NeverFits, PoolShort, QuotaShort) as error:
                refused.append((ask.sequence, error))
        return grants, refused

    def _answer_ask(self, ask: _Ask, grants: list[Grant]) -> None:
        """Grows one sequence, and makes its own what it will write. Raises NeverFits, PoolShort, QuotaShort; what
        settle() raises."""
        sequence, room, computed = ask
        num_blocks, own, tenant = self._blocks_for(room), len(sequence.blocks), sequence.tenant
        added = num_blocks - own if num_blocks > own else 0
        needed = added
        foreign: list[int] = []
        if not self._writes_own(sequence, computed) or tenant.quota or added > len(self.block_pool.free):
            # Whose blocks these are, and which can be given up, is known when all is written down.
            self.settle()
            if added:
                self._check_fits(sequence.sequence_id, room, num_blocks, tenant)
            foreign, copies = self._foreign_writes(sequence, computed, {}, {})
            needed += copies
            if needed:
                self._check_available(needed, 0)
                self._check_quota(needed, tenant)
        if added or foreign:
            self._grow((sequence, _NO_TOKENS, computed, foreign, added, needed), grants)

    def _writes_own(self, sequence: Sequence, computed: int) -> bool:
        """Whether a sequence writes next to its last block, or behind it, and nobody else has that one."""
        last = len(sequence.blocks) - 1
        if last < 0 or computed // self.spec.block_size < last:
            return False
        blocks, block = self.block_pool, sequence.blocks[last]
        return blocks.counts[block] == 1 and not blocks.index.names[block]


def _asks(news: News) -> list[_Ask]:
    """Who asks, and what for. The news are not written down yet."""
    # All that is known may be computed: what is told next will be written there without another ask.
    return [
        _Ask(sequence, len(sequence.chain.token_ids) + told + ask - 1, computed or sequence.computed)
        for sequence, told, computed, ask in compress(
            zip(news.sequences, news.token_counts, news.computed, news.asks, strict=True), news.asks
        )
    ]
