"""Who of those in line is let in, and when somebody who was refused is tried again.

An admission leaves over what those that run will still need (admission.py). A try costs a round trip: who was refused
for want of blocks is tried again when blocks of ours have come back, and only now and then for those of others. When
only a tenant's quota has run out, the line goes on behind that tenant's requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from enum import Enum

from model_runner.admission import headroom, parting
from model_runner.books import PINS_EXHAUSTED, QUOTA_SHORT, BooksRefused, KvBooks
from model_runner.output_lengths import OutputLengths
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step_plan import StepPlan
from model_runner.waiting_line import WaitingLine

STEPS_BETWEEN_TRIES = 32
"""Between two tries to admit the first in line while no block of ours has come back."""


class _Tried(Enum):
    """What came of a try to admit: admitted; no room now; or out of the way, refused or over its quota."""

    ADMITTED = 1
    NO_ROOM = 2
    OUT_OF_THE_WAY = 3


class Entrance:
    """Lets sequences of the waiting line in, as far as the books have room for them."""

    def __init__(self, books: KvBooks, limits: SchedulerLimits, waiting: WaitingLine, lengths: OutputLengths) -> None:
        self._books = books
        self._limits = limits
        self._waiting = waiting
        self._lengths = lengths
        self._refused: list[tuple[Sequence, BooksRefused]] = []
        self._steps_refused = 0
        self._is_shut = False
        """The books refused the first in line, and no block has come back since."""
        self._over_quota: set[str] = set()
        """Salts whose quota has no room; others need not wait behind them."""

    def let_in(self, running: Seq[Sequence], plan: StepPlan) -> Iterator[Sequence]:
        """Yields those who are admitted, in the order of the line, until one waits for more than its own tenant.

        Each has its block table, and must be at the end of `running` before the next one is taken. Raises what the
        books raise.
        """
        if not self._is_time(running) or not self._waiting:
            return
        chunk = self._limits.chunk
        budget = self._limits.max_batched_tokens - sum(min(sequence.pending, chunk) for sequence in running)
        slots = self._limits.slots - sum(_slots(sequence) for sequence in running)
        held_prefixes: Collection[int] = {key for sequence in running for key in sequence.prefix_keys}
        while budget > 0:
            sequence = self._waiting.next(held_prefixes, self._over_quota)
            if sequence is None:
                return
            fits = _slots(sequence) <= slots
            tried = self._try(sequence, min(chunk, budget), running, plan) if fits else _Tried.NO_ROOM
            if tried is _Tried.NO_ROOM:
                if sequence is self._waiting.next((), self._over_quota):
                    return
                # It was to go before its turn: whose turn it is may fit.
                held_prefixes = ()
            elif tried is _Tried.ADMITTED:
                budget -= min(sequence.pending, chunk)
                slots -= _slots(sequence)
                held_prefixes = {*held_prefixes, *sequence.prefix_keys}
                yield sequence

    def note_arrival(self, sequence: Sequence) -> None:
        """Somebody new is in line."""
        if next(iter(self._waiting)) is sequence:
            # Those behind it were refused, not this one.
            self._is_shut = False

    def note_room(self) -> None:
        """Blocks have come back, or the line has changed: whoever waits may have better luck now."""
        self._is_shut = False
        self._over_quota.clear()

    def take_refused(self) -> list[tuple[Sequence, BooksRefused]]:
        """Hands over those whom the books refused for good."""
        refused, self._refused = self._refused, []
        return refused

    def _is_time(self, running: Seq[Sequence]) -> bool:
        """Whether this step may try: a refused admission waits for blocks of ours, or for its turn."""
        held_up = self._is_shut or self._over_quota
        self._steps_refused = self._steps_refused + 1 if held_up else 0
        if not self._steps_refused % STEPS_BETWEEN_TRIES or not running:
            self._over_quota.clear()
            return True
        return not self._is_shut

    def _try(self, sequence: Sequence, tokens: int, running: Seq[Sequence], plan: StepPlan) -> _Tried:
        """Asks the books to admit a sequence that can have so many tokens in this step, and notes why they don't."""
        self._is_shut = False
        try:
            admitted = self._allocate(sequence, tokens, running, plan)
        except BooksRefused as error:
            if error.reason == QUOTA_SHORT:
                self._over_quota.add(sequence.live.request.cache_salt)
            else:
                self._waiting.take(sequence)
                self._refused.append((sequence, error))
            return _Tried.OUT_OF_THE_WAY
        if not admitted:
            self._is_shut = True
            return _Tried.NO_ROOM
        self._waiting.take(sequence)
        return _Tried.ADMITTED

    def _allocate(self, sequence: Sequence, tokens: int, running: Seq[Sequence], plan: StepPlan) -> bool:
        staying = [each for each in running if not self._waiting.displaces(sequence, each)]
        limits = self._limits
        reserve = max(
            headroom(staying, sequence, self._lengths, limits.block_size, limits.max_batched_tokens),
            parting(sequence, limits.block_size),
        )
        request = sequence.allocation(headroom_blocks=reserve, promised_tokens=tokens)
        try:
            admission = self._books.allocate(request)
        except BooksRefused as error:
            if error.reason != PINS_EXHAUSTED or not sequence.admitted_before:
                raise
            # What has begun is not ended for want of a pin.
            admission = self._books.allocate(replace(request, retention=replace(request.retention, pin_seconds=0.0)))
        if admission is None:
            return False
        if not sequence.admitted_before:
            sequence.live.cached_tokens = admission.cached_tokens
        sequence.start(admission.block_ids, admission.cached_tokens, limits.block_size)
        plan.copies.extend(admission.copies)
        return True


def _slots(sequence: Sequence) -> int:
    """Places that a sequence takes: one that is yet to fork needs them for all its choices, a search for all beams."""
    live = sequence.live
    if sequence.is_beam:
        return live.request.num_sequences if sequence is live.sequences[0] else 0
    return 1 if live.forked else live.request.num_sequences
