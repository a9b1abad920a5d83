"""Who computes how many tokens in the next step: continuous batching with chunked prefill under a token budget.

There are no phases. Each running sequence gets its one next token first; what is left of the budget goes to prompts,
oldest first, in chunks. Blocks come from the books: once per block for a running sequence, all at once for a prompt.
An admission leaves over what those that run will still need. When blocks run out all the same, a sequence gives its
own up and is computed again later, before anybody who has not been admitted yet: the one that was admitted last, or
under priorities the one that counts least. When only a tenant's quota has run out, that tenant alone waits and gives up
blocks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import Enum

from model_runner.admission import headroom, parting
from model_runner.books import (
    NEVER_FITS,
    PINS_EXHAUSTED,
    QUOTA_SHORT,
    BooksRefused,
    CopyOrder,
    Growth,
    KvBooks,
)
from model_runner.output_lengths import OutputLengths
from model_runner.request import FinishReason
from model_runner.sequence import Sequence
from model_runner.step_plan import StepPlan, Work
from model_runner.waiting_line import SchedulingPolicy, WaitingLine


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """block_size in tokens; at most max_sequences run and max_batched_tokens are computed in a step.

    prefill_chunk_tokens caps one prompt's share of a step; 0: the budget alone does. speculative_tokens are guessed at
    most for a sequence in a step, by looking up n-grams of speculative_ngram tokens and less; 0: nothing is guessed.
    """

    block_size: int
    max_sequences: int = 64
    max_batched_tokens: int = 512
    prefill_chunk_tokens: int = 0
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    speculative_tokens: int = 0
    speculative_ngram: int = 3

    @property
    def slots(self) -> int:
        """Sequences that may run at once: no more than tokens in a step, so that each advances in every step."""
        return min(self.max_sequences, self.max_batched_tokens)

    @property
    def chunk(self) -> int:
        return self.prefill_chunk_tokens or self.max_batched_tokens


_OF_A_TENANT = (NEVER_FITS, QUOTA_SHORT)
"""Why a growth is refused that has to do with one tenant's quota."""

STEPS_BETWEEN_TRIES = 32
"""Between two tries to admit the first in line while no block of ours has come back."""


class _Tried(Enum):
    """What came of a try to admit: admitted; no room now; or out of the way, refused or over its quota."""

    ADMITTED = 1
    NO_ROOM = 2
    OUT_OF_THE_WAY = 3


class Scheduler:
    """The waiting and the running sequences. `running` is in the order of admission.

    Whoever has a block table is in `running`, everybody else in `waiting`, unless it is paused.
    """

    def __init__(self, books: KvBooks, limits: SchedulerLimits) -> None:
        self._books = books
        self._limits = limits
        self.waiting = WaitingLine(limits.policy, limits.block_size)
        self.running: list[Sequence] = []
        self._paused: dict[int, Sequence] = {}
        """By the object's id."""
        self._admissions = 0
        self.preemptions = 0
        self._lengths = OutputLengths()
        self.refused: list[tuple[Sequence, BooksRefused]] = []
        """Sequences that the books won't hold, with the books' sentence, for the engine to take and to fail."""
        self._steps_refused = 0
        self._admission_failed = False
        """The books refused the first in line, and no block has come back since."""
        self._over_quota: set[str] = set()
        """Salts whose quota has no room; others need not wait behind them."""
        self._flying = False
        """A step is in flight while the next one is planned."""
        self._copies_due: list[CopyOrder] = []
        """Copies that the books have ordered, and that no step has carried out."""

    def add(self, sequence: Sequence) -> None:
        """Lines a new sequence up."""
        self.waiting.add(sequence)
        if next(iter(self.waiting)) is sequence:
            # Those behind it were refused, not this one.
            self._admission_failed = False

    def schedule(self, *, flying: bool = False) -> StepPlan:
        """Plans the next step. Raises what the books raise; then reset() must follow.

        Either way take_refused() must follow too. flying: a step is in flight, so that nobody can give up blocks.
        """
        plan = StepPlan(copies=self._copies_due)
        self._copies_due = []
        self._flying = flying
        self._grow(plan)
        if not plan.must_land:
            if not plan.preemptions:
                self._admit(plan)
            self._share_budget(plan)
        if not plan.work:
            # Nothing is written, so they can wait.
            self._copies_due, plan.copies = plan.copies, []
        return plan

    def fork(self, forks: list[tuple[Sequence, list[Sequence]]]) -> None:
        """Gives each parent's children its blocks, and lets them run. Raises what the books raise."""
        # All run from here on, so that a lost KV manager puts them back in line like everybody else.
        for parent, children in forks:
            self._adopt(parent, children)
        parents = [parent for parent, _ in forks]
        growth = self._books.append([parent.commit() for parent in parents]) or Growth()
        by_id = {parent.sequence_id: parent for parent in parents}
        for grant in growth.grants:
            by_id[grant.sequence_id].take_over(grant)
            self._copies_due += grant.copies
        for parent, children in forks:
            parent.share_with(children)
            self._books.fork(parent.sequence_id, [child.sequence_id for child in children])

    def take_refused(self) -> list[tuple[Sequence, BooksRefused]]:
        """Hands over those whom the books refused; whatever they hold is theirs until they are finished."""
        refused, self.refused = self.refused, []
        return refused

    def finish(self, sequences: list[Sequence]) -> None:
        """Ends sequences, running or waiting, and gives back what they hold, computed tokens committed."""
        holders = _holders(sequences)
        self._remove(sequences)
        for sequence in sequences:
            if sequence.num_outputs and not sequence.is_beam:
                self._lengths.note(sequence.num_outputs, ended=sequence.finish_reason is FinishReason.STOP)
        if holders:
            self._note_room()
            self._books.free([sequence.update() for sequence in holders])

    def pause(self, sequences: list[Sequence]) -> None:
        """Takes sequences out of the line, or out of what runs: they give back what they hold until they resume."""
        holders = _holders(sequences)
        updates = [sequence.update() for sequence in holders]
        self._remove(sequences)
        for sequence in holders:
            sequence.lose_blocks()
        self._paused.update((id(each), each) for each in [sequence.stand_in() for sequence in sequences])
        if holders:
            self._note_room()
            self._books.free(updates, preempted=True)

    def resume(self, sequences: list[Sequence]) -> None:
        """Lines paused sequences up again."""
        for sequence in sequences:
            if self._paused.pop(id(sequence), None) is not None:
                self.waiting.put_back(sequence)

    def reset(self) -> None:
        """Every running sequence goes back in line, before those never admitted: the books know none of them."""
        running, self.running = self.running, []
        self._copies_due = []
        self._put_back(running)

    def _adopt(self, parent: Sequence, children: list[Sequence]) -> None:
        """Lets children run. Beams stand where their search does."""
        if not parent.is_beam:
            for child in children:
                self._run(child)
            return
        for child in children:
            child.number = parent.number
        place = self.running.index(parent) + 1
        self.running[place:place] = children

    def _grow(self, plan: StepPlan) -> None:
        """Tells the books what was computed and gets room for the next token of each running sequence."""
        due = [sequence for sequence in self.running if sequence.needs_books(self._limits.block_size)]
        while due:
            try:
                growth = self._books.append([sequence.update() for sequence in due])
            except BooksRefused as error:
                if error.reason not in _OF_A_TENANT:
                    raise
                plan.must_land = self._flying
                if plan.must_land:
                    return
                due = self._grow_one_by_one(due, plan)
                continue
            if growth is not None:
                plan.apply(growth, due)
                return
            plan.must_land = self._flying
            if plan.must_land:
                return
            self._preempt(self.waiting.victim(self.running), plan)
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
                if error.reason not in _OF_A_TENANT:
                    raise
                if error.reason == QUOTA_SHORT and self._tenant_gives_way(sequence, plan):
                    again.append(sequence)
                else:
                    self.refused.append((sequence, BooksRefused(str(error), NEVER_FITS)))
                continue
            if growth is None:
                again.append(sequence)
            else:
                plan.apply(growth, [sequence])
        return _holders(again)

    def _tenant_gives_way(self, asker: Sequence, plan: StepPlan) -> bool:
        """Preempts among the tenant of who asks; not a search that has the quota to itself: it would never fit."""
        salt = asker.live.request.cache_salt
        tenants = [each for each in self.running if each.live.request.cache_salt == salt]
        if asker.is_beam and all(each.live is asker.live for each in tenants):
            return False
        self._preempt(self.waiting.victim(tenants), plan)
        return True

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Takes the blocks of a sequence, and of its search; it comes back before those never admitted."""
        victims = victim.live.sequences if victim.is_beam else [victim]
        self._books.free([each.update() for each in victims], preempted=True)
        self.running = [each for each in self.running if each not in victims]
        victim.live.preemptions += 1
        self.preemptions += 1
        plan.preemptions += 1
        self._put_back(victims)

    def _put_back(self, sequences: list[Sequence]) -> None:
        """Lines up those that have lost their blocks; one sequence stands for the beams of a search."""
        for sequence in sequences:
            sequence.lose_blocks()
        for sequence in dict.fromkeys(each.stand_in() for each in sequences):
            self.waiting.put_back(sequence)
        self._note_room()

    def _admit(self, plan: StepPlan) -> None:
        """Lets sequences in, in the order of the line, until one has to wait for more than its own tenant."""
        # A try costs a round trip: it waits until blocks of ours come back, and only now and then asks for others'.
        held_up = self._admission_failed or self._over_quota
        self._steps_refused = self._steps_refused + 1 if held_up else 0
        if not self._steps_refused % STEPS_BETWEEN_TRIES or not self.running:
            self._over_quota.clear()
        elif self._admission_failed:
            return
        if not self.waiting:
            return
        chunk = self._limits.chunk
        budget = self._limits.max_batched_tokens - sum(min(sequence.pending, chunk) for sequence in self.running)
        slots = self._limits.slots - sum(_slots(sequence) for sequence in self.running)
        held_prefixes: Collection[int] = {key for sequence in self.running for key in sequence.prefix_keys}
        while budget > 0:
            sequence = self.waiting.next(held_prefixes, self._over_quota)
            if sequence is None:
                return
            tried = self._try(sequence, min(chunk, budget), plan) if _slots(sequence) <= slots else _Tried.NO_ROOM
            if tried is _Tried.NO_ROOM:
                if sequence is self.waiting.next((), self._over_quota):
                    return
                # It was to go before its turn: whose turn it is may fit.
                held_prefixes = ()
            elif tried is _Tried.ADMITTED:
                budget -= min(sequence.pending, chunk)
                slots -= _slots(sequence)
                held_prefixes = {*held_prefixes, *sequence.prefix_keys}

    def _try(self, sequence: Sequence, tokens: int, plan: StepPlan) -> _Tried:
        """Asks the books to admit a sequence that can have so many tokens in this step, and notes why they don't."""
        self._admission_failed = False
        try:
            admitted = self._allocate(sequence, tokens, plan)
        except BooksRefused as error:
            if error.reason == QUOTA_SHORT:
                self._over_quota.add(sequence.live.request.cache_salt)
            else:
                self.waiting.take(sequence)
                self.refused.append((sequence, error))
            return _Tried.OUT_OF_THE_WAY
        if not admitted:
            self._admission_failed = True
            return _Tried.NO_ROOM
        self.waiting.take(sequence)
        self._run(sequence)
        return _Tried.ADMITTED

    def _run(self, sequence: Sequence) -> None:
        self._admissions += 1
        sequence.number = self._admissions
        self.running.append(sequence)

    def _allocate(self, sequence: Sequence, tokens: int, plan: StepPlan) -> bool:
        staying = [each for each in self.running if not self.waiting.displaces(sequence, each)]
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

    def _share_budget(self, plan: StepPlan) -> None:
        budget = self._limits.max_batched_tokens
        able = self._able(plan)
        decodes = [sequence for sequence in able if sequence.pending == 1]
        prefills = [sequence for sequence in able if sequence.pending > 1]
        plan.work.extend(Work(sequence, 1) for sequence in decodes)
        plan.prefill_tokens = sum(1 for sequence in decodes if not sequence.has_outputs)
        budget -= len(decodes)
        for sequence in prefills:
            if budget <= 0:
                return
            # The beams of a search compute their last tokens all in one step.
            due = sequence.pending - (sequence.is_beam and sequence.live.forked)
            count = min(due, budget, self._limits.chunk)
            plan.work.append(Work(sequence, count))
            plan.prefill_tokens += count
            budget -= count

    def _able(self, plan: StepPlan) -> list[Sequence]:
        """The running sequences that can have their next tokens; the others sit this step out.

        They have no room, or may not ask for it yet, or are beams whose next step waits for others of their search.
        """
        refused = {sequence.sequence_id for sequence, _ in self.refused}
        without_room = refused.union(plan.stalled)
        size = self._limits.block_size
        able = [each for each in self.running if each.sequence_id not in without_room and each.room(size) >= 0]
        beams = [each for each in self.running if each.is_beam]
        held_up = {id(each.live) for each in beams if each.pending > 1 or each.sequence_id in without_room}
        if not held_up:
            return able
        return [each for each in able if each.pending > 1 or id(each.live) not in held_up]

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
            self.waiting.remove(gone)
            for each in gone & self._paused.keys():
                del self._paused[each]


def _holders(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.block_table]


def _slots(sequence: Sequence) -> int:
    """Places that a sequence takes: one that is yet to fork needs them for all its choices, a search for all beams."""
    live = sequence.live
    if sequence.is_beam:
        return live.request.num_sequences if sequence is live.sequences[0] else 0
    return 1 if live.forked else live.request.num_sequences
