"""Who computes how many tokens in the next step: continuous batching with chunked prefill under a token budget.

There are no phases. Each running sequence gets its one next token first; what is left of the budget goes to prompts,
oldest first, in chunks. Blocks come from the books: once per block for a running sequence, all at once for a prompt.
Who gets in, entrance.py says. When blocks run out all the same, a sequence gives its own up and is computed again
later, before anybody who has not been admitted yet: the one that was admitted last, or under priorities the one that
counts least. When only a tenant's quota has run out, that tenant alone gives up blocks.
"""

from __future__ import annotations

from model_runner.books import NEVER_FITS, QUOTA_SHORT, BooksRefused, CopyOrder, Growth, KvBooks
from model_runner.entrance import Entrance
from model_runner.output_lengths import OutputLengths
from model_runner.request import FinishReason
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step_plan import StepPlan, Work
from model_runner.waiting_line import WaitingLine

_OF_A_TENANT = (NEVER_FITS, QUOTA_SHORT)
"""Why a growth is refused that has to do with one tenant's quota."""


class Scheduler:
    """The waiting and the running sequences. `running` is in the order of admission.

    Whoever has a block table is in `running`, everybody else in `waiting`, unless it is paused.
    """

    def __init__(self, books: KvBooks, limits: SchedulerLimits) -> None:
        self._books = books
        self._limits = limits
        self.waiting = WaitingLine(limits.policy, limits.block_size)
        self._lengths = OutputLengths()
        self._entrance = Entrance(books, limits, self.waiting, self._lengths)
        self.running: list[Sequence] = []
        self._paused: dict[int, Sequence] = {}
        """By the object's id."""
        self._admissions = 0
        self.preemptions = 0
        self._refused: list[tuple[Sequence, BooksRefused]] = []
        self._flying = False
        """A step is in flight while the next one is planned."""
        self._copies_due: list[CopyOrder] = []
        """Copies that the books have ordered, and that no step has carried out."""

    def add(self, sequence: Sequence) -> None:
        """Lines a new sequence up."""
        self.waiting.add(sequence)
        self._entrance.note_arrival(sequence)

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
                for sequence in self._entrance.let_in(self.running, plan):
                    self._run(sequence)
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
        refused = self._refused + self._entrance.take_refused()
        self._refused = []
        return refused

    def finish(self, sequences: list[Sequence]) -> None:
        """Ends sequences, running or waiting, and gives back what they hold, computed tokens committed."""
        holders = _holders(sequences)
        self._remove(sequences)
        for sequence in sequences:
            if sequence.num_outputs and not sequence.is_beam:
                self._lengths.note(sequence.num_outputs, ended=sequence.finish_reason is FinishReason.STOP)
        if holders:
            self._entrance.note_room()
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
            self._entrance.note_room()
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
                    self._refused.append((sequence, BooksRefused(str(error), NEVER_FITS)))
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
        self._entrance.note_room()

    def _run(self, sequence: Sequence) -> None:
        self._admissions += 1
        sequence.number = self._admissions
        self.running.append(sequence)

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
        refused = {sequence.sequence_id for sequence, _ in self._refused}
        without_room = refused.union(plan.stalled)
        size = self._limits.block_size
        able = [each for each in self.running if each.sequence_id not in without_room and each.room(size) >= 0]
        beams = [each for each in self.running if each.is_beam]
        held_up = {id(each.live) for each in beams if each.pending > 1 or each.sequence_id in without_room}
        if not held_up:
            return able
        return [each for each in able if each.pending > 1 or id(each.live) not in held_up]

    def _remove(self, sequences: list[Sequence]) -> None:
        gone = set(map(id, sequences))
        self.running = [sequence for sequence in self.running if id(sequence) not in gone]
        if any(not sequence.block_table for sequence in sequences):
            # It may have been the first in line, who held up the others.
            self._entrance.note_room()
            self.waiting.remove(gone)
            for each in gone & self._paused.keys():
                del self._paused[each]


def _holders(sequences: list[Sequence]) -> list[Sequence]:
    return [sequence for sequence in sequences if sequence.block_table]
