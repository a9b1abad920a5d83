"""Who computes how many tokens in the next step: continuous batching with chunked prefill under a token budget.

There are no phases. Each running sequence gets its one next token first; what is left of the budget goes to prompts,
oldest first, in chunks. Blocks come from the books: once per block for a running sequence, all at once for a prompt.
When they run out, the sequence that was admitted last gives its blocks up and is computed again later, before anybody
who has not been admitted yet. When only a tenant's quota has run out, that tenant alone waits and gives up blocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from model_runner.books import (
    NEVER_FITS,
    PINS_EXHAUSTED,
    QUOTA_SHORT,
    BooksRefused,
    CopyOrder,
    Growth,
    KvBooks,
)
from model_runner.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """block_size in tokens; at most max_sequences run and max_batched_tokens are computed in a step.

    prefill_chunk_tokens caps one prompt's share of a step; 0: the budget alone does.
    """

    block_size: int
    max_sequences: int = 64
    max_batched_tokens: int = 512
    prefill_chunk_tokens: int = 0

    @property
    def slots(self) -> int:
        """Sequences that may run at once: no more than tokens in a step, so that each advances in every step."""
        return min(self.max_sequences, self.max_batched_tokens)

    @property
    def chunk(self) -> int:
        return self.prefill_chunk_tokens or self.max_batched_tokens


@dataclass(frozen=True, slots=True)
class Work:
    """The next `num_tokens` tokens of one sequence."""

    sequence: Sequence
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What a step computes, the copies due before it, and how many sequences lost their blocks for it.

    prefill_tokens: of the work, tokens of prompts or computed again. stalled: ids of running sequences that sit the
    step out, because the books have no word on them for now.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[CopyOrder] = field(default_factory=list)
    preemptions: int = 0
    prefill_tokens: int = 0
    stalled: set[str] = field(default_factory=set)


_OF_A_TENANT = (NEVER_FITS, QUOTA_SHORT)
"""Why a growth is refused that has to do with one tenant's quota."""

STEPS_BETWEEN_TRIES = 32
"""Between two tries to admit the first in line while no block of ours has come back."""


class Scheduler:
    """The waiting and the running sequences. `running` is in the order of admission.

    Whoever has a block table is in `running`, everybody else in `waiting`.
    """

    def __init__(self, books: KvBooks, limits: SchedulerLimits) -> None:
        self._books = books
        self._limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.refused: list[tuple[Sequence, BooksRefused]] = []
        """Sequences that the books won't hold, with the books' sentence, for the engine to take and to fail."""
        self._steps_refused = 0
        self._admission_failed = False
        """The books refused the first in line, and no block has come back since."""
        self._over_quota: set[str] = set()
        """Salts whose quota has no room; others need not wait behind them."""

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the line."""
        self.waiting.append(sequence)

    def adopt(self, children: list[Sequence]) -> None:
        """Takes over forked sequences, which hold blocks already."""
        self.running.extend(children)

    def schedule(self) -> StepPlan:
        """Plans the next step. Raises what the books raise; then reset() must follow.

        Either way take_refused() must follow too.
        """
        plan = StepPlan()
        self._grow(plan)
        if not plan.preemptions:
            self._admit(plan)
        self._share_budget(plan)
        return plan

    def take_refused(self) -> list[tuple[Sequence, BooksRefused]]:
        """Hands over those whom the books refused; whatever they hold is theirs until they are finished."""
        refused, self.refused = self.refused, []
        return refused

    def finish(self, sequences: list[Sequence]) -> None:
        """Ends sequences, running or waiting, and gives back what they hold, computed tokens committed."""
        holders = _holders(sequences)
        self._remove(sequences)
        if holders:
            self._note_room()
            self._books.free([sequence.update() for sequence in holders])

    def reset(self) -> None:
        """Every running sequence goes back to the front of the line, oldest first: the books know none of them."""
        for sequence in reversed(self.running):
            sequence.lose_blocks()
            self.waiting.appendleft(sequence)
        self.running.clear()
        self._note_room()

    def _grow(self, plan: StepPlan) -> None:
        """Tells the books what was computed and gets room for the next token of each running sequence."""
        due = [sequence for sequence in self.running if sequence.needs_books(self._limits.block_size)]
        while due:
            try:
                growth = self._books.append([sequence.update() for sequence in due])
            except BooksRefused as error:
                if error.reason not in _OF_A_TENANT:
                    raise
                due = self._grow_one_by_one(due, plan)
                continue
            if growth is not None:
                _apply(growth, due, plan)
                return
            self._preempt(self.running[-1], plan)
            due = _holders(due)

    def _grow_one_by_one(self, due: list[Sequence], plan: StepPlan) -> list[Sequence]:
        """For when a quota refuses a growth of them all: only who has that quota pays for it.

        Returns those who must ask again.
        """
        again: list[Sequence] = []
        for sequence in due:
            if not sequence.block_table:
                continue
            try:
                growth = self._books.append([sequence.update()])
            except BooksRefused as error:
                if error.reason == QUOTA_SHORT:
                    again.append(sequence)
                    self._preempt(self._last_of(sequence.live.request.cache_salt), plan)
                elif error.reason == NEVER_FITS:
                    self.refused.append((sequence, error))
                else:
                    raise
                continue
            if growth is None:
                again.append(sequence)
            else:
                _apply(growth, [sequence], plan)
        return _holders(again)

    def _last_of(self, salt: str) -> Sequence:
        return next(each for each in reversed(self.running) if each.live.request.cache_salt == salt)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Takes the blocks of a sequence; it comes back before those never admitted."""
        self._books.free([victim.update()], preempted=True)
        self.running.remove(victim)
        victim.lose_blocks()
        victim.live.preemptions += 1
        plan.preemptions += 1
        self.waiting.appendleft(victim)
        self._note_room()

    def _admit(self, plan: StepPlan) -> None:
        """Lets sequences in from the front of the line, until one has to wait for more than its own tenant."""
        # A try costs a round trip: it waits until blocks of ours come back, and only now and then asks for others'.
        held_up = self._admission_failed or self._over_quota
        self._steps_refused = self._steps_refused + 1 if held_up else 0
        if not self._steps_refused % STEPS_BETWEEN_TRIES or not self.running:
            self._over_quota.clear()
        elif self._admission_failed:
            return
        chunk = self._limits.chunk
        budget = self._limits.max_batched_tokens - sum(min(sequence.pending, chunk) for sequence in self.running)
        slots = self._limits.slots - sum(_slots(sequence) for sequence in self.running)
        passed: list[Sequence] = []
        try:
            while self.waiting and budget > 0 and _slots(self.waiting[0]) <= slots:
                sequence = self.waiting[0]
                if sequence.live.request.cache_salt in self._over_quota:
                    passed.append(self.waiting.popleft())
                    continue
                if not self._try(sequence, plan):
                    if self._admission_failed:
                        return
                    continue
                self.running.append(self.waiting.popleft())
                budget -= min(sequence.pending, chunk)
                slots -= _slots(sequence)
        finally:
            self.waiting.extendleft(reversed(passed))

    def _try(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Asks the books to admit the first in line, and notes why they don't."""
        try:
            admitted = self._allocate(sequence, plan)
        except BooksRefused as error:
            self._admission_failed = False
            if error.reason == QUOTA_SHORT:
                self._over_quota.add(sequence.live.request.cache_salt)
            else:
                self.refused.append((self.waiting.popleft(), error))
            return False
        self._admission_failed = not admitted
        return admitted

    def _allocate(self, sequence: Sequence, plan: StepPlan) -> bool:
        # Each running sequence will soon need a block: an admission that takes the last ones would be undone by them.
        request = sequence.allocation(headroom_blocks=len(self.running))
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
        sequence.start(admission.block_ids, admission.cached_tokens)
        plan.copies.extend(admission.copies)
        return True

    def _share_budget(self, plan: StepPlan) -> None:
        budget = self._limits.max_batched_tokens
        refused = {id(sequence) for sequence, _ in self.refused}
        running = [
            sequence
            for sequence in self.running
            if id(sequence) not in refused and sequence.sequence_id not in plan.stalled
        ]
        decodes = [sequence for sequence in running if sequence.pending == 1]
        prefills = [sequence for sequence in running if sequence.pending > 1]
        plan.work.extend(Work(sequence, 1) for sequence in decodes)
        plan.prefill_tokens = sum(1 for sequence in decodes if not sequence.num_outputs)
        budget -= len(decodes)
        for sequence in prefills:
            if budget <= 0:
                return
            count = min(sequence.pending, budget, self._limits.chunk)
            plan.work.append(Work(sequence, count))
            plan.prefill_tokens += count
            budget -= count

    def _note_room(self) -> None:
        """Whoever waits may have better luck now."""
        self._admission_failed = False
        self._over_quota.clear()

    def _remove(self, sequences: list[Sequence]) -> None:
        gone = set(map(id, sequences))
        self.running = [sequence for sequence in self.running if id(sequence) not in gone]
        if any(not sequence.block_table for sequence in sequences):
            # It may have been the first in line, who held up the others.
            self._note_room()
            self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in gone)


def _holders(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.block_table]


def _apply(growth: Growth, due: list[Sequence], plan: StepPlan) -> None:
    by_id = {grant.sequence_id: grant for grant in growth.grants}
    for sequence in due:
        if sequence.sequence_id not in growth.stalled:
            sequence.apply(by_id.get(sequence.sequence_id))
    plan.copies.extend(copy for grant in growth.grants for copy in grant.copies)
    plan.stalled |= growth.stalled


def _slots(sequence: Sequence) -> int:
    """Places that a sequence takes: one that is yet to fork needs them for all its choices."""
    live = sequence.live
    return 1 if live.forked else live.request.num_choices
