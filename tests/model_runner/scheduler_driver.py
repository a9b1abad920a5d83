"""The scheduler over real books, driven by hand: a driver that plays the engine, and books that note what is asked."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvmanager import KvManager
from model_runner.admission import SearchRoom
from model_runner.books import Admission, AllocationRequest, BlockGrant, PoolFacts, SequenceUpdate
from model_runner.generation import Generation
from model_runner.observer import SilentObserver
from model_runner.request import FinishReason, GenerateRequest, StopConditions
from model_runner.scheduler import Scheduler
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.sequence import LiveRequest, Sequence
from model_runner.step_plan import StepPlan
from services.books_inprocess import InProcessBooks
from tests.model_runner.toy_model import ToyTokenizer

DRAWN = 100
"""The token that the driver draws, always."""


@dataclass(frozen=True)
class Call:
    """One verb: the names of its sequences, whether it was granted, and whether an admission was a resumed one."""

    verb: str
    names: tuple[str, ...]
    granted: bool = True
    resumed: bool = False


class SpyBooks(InProcessBooks):
    """Real books that note what they are asked."""

    def __init__(self, manager: KvManager) -> None:
        super().__init__(manager)
        self.calls: list[Call] = []

    def allocate(self, request: AllocationRequest) -> Admission | None:
        admission = super().allocate(request)
        self.calls.append(Call("allocate", (request.sequence_id,), admission is not None, request.resumed))
        return admission

    def append(self, updates: Seq[SequenceUpdate]) -> list[BlockGrant] | None:
        grants = super().append(updates)
        self.calls.append(Call("append", tuple(each.sequence_id for each in updates), grants is not None))
        return grants

    def fork(self, parent_id: str, child_ids: Seq[str]) -> None:
        super().fork(parent_id, child_ids)
        self.calls.append(Call("fork", (parent_id, *child_ids)))

    def free(self, updates: Seq[SequenceUpdate], *, preempted: bool = False) -> None:
        super().free(updates, preempted=preempted)
        self.calls.append(Call("free", tuple(each.sequence_id for each in updates)))


class Driver:
    """Plays the engine: carries plans out, draws tokens, forks choices; checks each plan against the books."""

    def __init__(self, *, usable_blocks: int = 1_000, block_size: int = 16, **limits) -> None:
        self.block_size = block_size
        self.limits = SchedulerLimits(block_size, **limits)
        self.manager = KvManager("boot")
        self.books = SpyBooks(self.manager)
        self.books.open(PoolFacts(usable_blocks + 1, block_size, 0, "toy"))
        self.scheduler = Scheduler(self.books, self.limits)
        self.sequences: list[Sequence] = []
        self.computed_tokens = 0
        self.preemptions = 0
        room = SearchRoom(usable_blocks, block_size)
        self._generation = Generation(ToyTokenizer(), frozenset(), 1_000_000, SilentObserver(), room)

    def add(
        self,
        name: str,
        num_tokens: int,
        num_choices: int = 1,
        *,
        prompt: Seq[int] | None = None,
        arrived_at: float = 0.0,
        max_tokens: int | None = None,
        **options,
    ) -> Sequence:
        """Puts a request in line; its sequence is called '<name>/0', its prompt is like nobody else's unless given."""
        first_token = 100_000 * (len(self.sequences) + 1)
        request = GenerateRequest(
            name,
            tuple(range(first_token, first_token + num_tokens) if prompt is None else prompt),
            num_choices=num_choices,
            stop=StopConditions(max_tokens=max_tokens),
            **options,
        )
        live = LiveRequest(request, arrived_at=arrived_at)
        sequence = self._generation.first_sequence(live)
        live.sequences.append(sequence)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        """Schedules and computes one step."""
        plan = self.scheduler.schedule()
        self._check(plan)
        self.preemptions += plan.preemptions
        for work in plan.work:
            sequence = work.sequence
            sequence.launch(work.num_tokens, goes_on=False)
            sequence.land(work.num_tokens)
            self.computed_tokens += work.num_tokens
            if not sequence.pending:
                self._draw(sequence)
        return plan

    def end_after(self, outputs: int, *names: str) -> None:
        """Ends whoever has so many outputs, of these requests if any are named: at its limit or else by itself."""
        ended = [
            sequence
            for sequence in self.scheduler.running
            if sequence.num_outputs == outputs and (not names or sequence.live.request.request_id in names)
        ]
        for sequence in ended:
            limited = sequence.live.request.stop.max_tokens == outputs
            sequence.finish_reason = FinishReason.LENGTH if limited else FinishReason.STOP
        if ended:
            self.scheduler.finish(ended)

    def steps(self, count: int) -> list[dict[str, int]]:
        """The work of the next `count` steps."""
        return [work_of(self.step()) for _ in range(count)]

    def asked(self) -> list[Call]:
        """The calls since the last time."""
        calls = self.books.calls[:]
        self.books.calls.clear()
        return calls

    @property
    def running(self) -> list[str]:
        return names(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        return names(self.scheduler.waiting)

    @property
    def held_blocks(self) -> int:
        return self.manager.pool("default").occupancy().held_blocks

    def _draw(self, sequence: Sequence) -> None:
        """One token for each choice; the first time the choices part, as in the engine."""
        live = sequence.live
        children: list[Sequence] = []
        if not live.forked:
            live.forked = True
            children = [
                Sequence(
                    live=live,
                    choice_index=index,
                    sequence_id=f"{live.request.request_id}/{index}",
                    token_ids=sequence.token_ids[:],
                    seed=0,
                    detokenizer=sequence.detokenizer,
                )
                for index in range(1, live.request.num_choices)
            ]
        for each in (sequence, *children):
            each.token_ids.append(DRAWN)
            each.num_outputs += 1
        if children:
            live.sequences.extend(children)
            self.scheduler.fork([(sequence, children)])

    def _check(self, plan: StepPlan) -> None:
        """The budget is kept, each sequence works once and has room, and both sides have the same block tables."""
        pool = self.manager.pool("default")
        assert pool.check().violations == ()
        assert self.scheduler.waiting.violations() == []
        assert sum(work.num_tokens for work in plan.work) <= self.limits.max_batched_tokens
        workers = [work.sequence.sequence_id for work in plan.work]
        assert len(set(workers)) == len(workers)
        assert set(workers) <= set(self.running)
        for work in plan.work:
            sequence = work.sequence
            assert 1 <= work.num_tokens <= sequence.pending
            assert sequence.computed + work.num_tokens <= len(sequence.block_table) * self.block_size
        for sequence in self.scheduler.running:
            assert sequence.block_table == pool.sequence(sequence.sequence_id).blocks
        for sequence in self.scheduler.waiting:
            assert (sequence.block_table, sequence.computed) == ([], 0)
        assert set(pool.live) == set(self.running)


def names(sequences: Seq[Sequence]) -> list[str]:
    return [sequence.sequence_id for sequence in sequences]


def work_of(plan: StepPlan) -> dict[str, int]:
    """Tokens by sequence."""
    return {work.sequence.sequence_id: work.num_tokens for work in plan.work}
