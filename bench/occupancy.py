"""What the slots of held blocks are for: workload D played on a virtual clock, each slot counted in each step.

    python -m bench.occupancy

The engine, its scheduler, its session and the books are those of a server. No model runs: a step takes the time that it
would take a model, so that every run gives the same figures on any machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

import typer
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from bench.figures import show
from bench.serve.workloads import Workload, build
from bench.sleeping import SleepingExecutor
from bench.virtual_time import StepTime, VirtualClock, VirtualEngine, VirtualManager, VirtualSteps
from kvmanager.runner_pool import RunnerPool
from model_runner.books import PoolFacts
from model_runner.engine_types import EngineOptions, EngineState, Failure
from model_runner.observer import SilentObserver, StepReport
from model_runner.request import Chunk, GenerateRequest, StopConditions
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.steps import StepOrder
from model_runner.tokenizer import Tokenizer
from services.config import ModelRunnerSettings, load_settings
from services.session.limits import SessionLimits
from services.session.session import SilentWatch
from services.session_books import SessionBooks

BLOCK_SIZE = 16
VOCABULARY, DRAWN = 64, 40
"""Tokens that can be drawn, and the one that always is."""
FLOAT32 = StepTime(fixed=0.005, row=0.002)
"""About the demo's model in float32 arithmetic on two cores."""
ROUND_TRIP_SECONDS = 0.004
"""About the median of a message beside a busy engine (docs/split.md)."""


@dataclass(slots=True)
class Slots:
    """Slots of held blocks by what they are for, summed over time in slots x seconds. A shared block counts once.

    computed: of tokens whose K/V is there when the step ends. uncomputed: of tokens of prompts that wait for a later
    step. tails: behind the tokens in a sequence's last block. ahead: of blocks that a sequence has and does not need
    yet. spare: of the lease.
    """

    computed: float = 0.0
    uncomputed: float = 0.0
    tails: float = 0.0
    ahead: float = 0.0
    spare: float = 0.0

    @property
    def total(self) -> float:
        return sum(self.shares(1.0).values())

    @property
    def useful(self) -> float:
        """Share of the slots that are for tokens that there are, whether computed yet or not."""
        return (self.computed + self.uncomputed) / self.total

    def shares(self, whole: float) -> dict[str, float]:
        """Each kind by `whole`."""
        return {each.name: getattr(self, each.name) / whole for each in fields(self)}

    def add(self, other: Slots, weight: float) -> None:
        """Adds others, `weight` times."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + weight * getattr(other, each.name))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of one sequence: how many have K/V, and how many are known."""

    computed: int
    known: int


def slots_of(tables: Mapping[str, Sequence[int]], tokens: Mapping[str, Tokens], spare: int, block_size: int) -> Slots:
    """The slots of all blocks that block tables name, and of so many spare ones, at one moment."""
    fill: dict[int, tuple[int, int]] = {}
    for name, table in tables.items():
        there = tokens.get(name, Tokens(0, 0))
        for index, block in enumerate(table):
            first = index * block_size
            known, computed = (min(block_size, max(0, each - first)) for each in (there.known, there.computed))
            fill[block] = max(fill.get(block, (0, 0)), (known, computed))
    found = Slots(spare=float(spare * block_size))
    for known, computed in fill.values():
        found.computed += computed
        found.uncomputed += known - computed
        if known:
            found.tails += block_size - known
        else:
            found.ahead += block_size
    return found


@dataclass(slots=True)
class Played(SilentObserver, SilentWatch):
    """What a workload came to. tokens: computed in all steps; sequences: in steps, summed up; waits: steps in which
    somebody who runs, or is let in, waited for the KV manager."""

    slots: Slots
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    sequences: int = 0
    preemptions: int = 0
    held: float = 0.0
    """Held blocks, summed over time in blocks x seconds."""
    messages: int = 0
    waits: int = 0
    waited_seconds: float = 0.0

    def on_wait(self, seconds: float) -> None:
        self.waits += 1
        self.waited_seconds += seconds

    def on_step(self, report: StepReport) -> None:
        self.preemptions += report.preemptions

    def note(self, order: StepOrder, engine: VirtualEngine, pool: RunnerPool, seconds: float) -> None:
        """A step of so many seconds is done."""
        self.steps += 1
        self.tokens += sum(len(entry.token_ids) for entry in order.entries)
        self.sequences += len(order.entries)
        tables = {name: sequence.blocks for name, sequence in pool.live.items()}
        tokens = {each.sequence_id: Tokens(each.computed + each.flying, len(each.token_ids)) for each in engine.running}
        self.slots.add(slots_of(tables, tokens, len(pool.lease), pool.spec.block_size), seconds)
        self.held += seconds * pool.block_pool.held


def play(
    workload: Workload,
    time: StepTime = FLOAT32,
    round_trip: float = ROUND_TRIP_SECONDS,
    lease_blocks: int | None = None,
) -> Played:
    """Plays requests of one turn, with the settings of a server by default, in a pool of the workload's size."""
    clock = VirtualClock()
    server = VirtualManager(clock, round_trip)
    settings = load_settings(ModelRunnerSettings, {} if lease_blocks is None else {"lease_blocks": lease_blocks})
    facts = PoolFacts(workload.cache_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, 0, "none")
    played = Played(Slots())
    books = SessionBooks(
        server.dial,
        lease_blocks=settings.lease_of(facts.num_blocks),
        limits=SessionLimits(beat=0),
        watch=played,
        clock=clock,
    )
    ended: set[str] = set()
    model = SleepingExecutor(0.0, VOCABULARY, DRAWN)
    engine = VirtualEngine(
        model,
        books,
        _tokenizer(),
        EngineOptions(
            facts,
            SchedulerLimits(
                BLOCK_SIZE, max_sequences=settings.max_sequences, max_batched_tokens=settings.max_batched_tokens
            ),
            max_sequence_tokens=workload.cache_tokens,
            eos_token_ids=frozenset(),
        ),
        lambda items: ended.update(_ended(items)),
        observer=played,
        steps=VirtualSteps(
            time, server, model, lambda order, seconds: played.note(order, engine, server.pool, seconds)
        ),
    )
    engine.clock = clock
    while engine.state is not EngineState.SERVING:
        engine.turn()
    started = clock.now
    todo = sorted(enumerate(workload.conversations), key=lambda each: each[1].arrival, reverse=True)
    while len(ended) < len(workload.conversations):
        while todo and started + todo[-1][1].arrival <= clock.now:
            number, conversation = todo.pop()
            turn = conversation.turns[0]
            stop = StopConditions(max_tokens=turn.max_tokens, ignore_eos=True)
            engine.submit(GenerateRequest(str(number), turn.prompt, stop=stop))
        engine.turn()
    played.seconds = clock.now - started
    played.messages = server.counts.steps
    return played


def _ended(items: Sequence[Chunk | Failure]) -> Iterable[str]:
    for item in items:
        if isinstance(item, Failure):
            raise RuntimeError(item.sentence)
        if item.usage is not None:
            yield item.request_id


def _tokenizer() -> Tokenizer:
    """Token i is a character."""
    backend = Backend(BPE(vocab={chr(33 + index): index for index in range(VOCABULARY)}, merges=[]))
    backend.decoder = ByteLevel()
    return Tokenizer(backend)


def floor(workload: Workload, block_size: int) -> float:
    """Share of useful slots if a sequence had the blocks of its tokens alone, over all steps that draw a token."""
    lengths = [
        len(turn.prompt) + output
        for conversation in workload.conversations
        for turn in conversation.turns
        for output in range(turn.max_tokens)
    ]
    return sum(lengths) / sum(-(-length // block_size) * block_size for length in lengths)


def report(workload: Workload, played: Played) -> dict[str, float]:
    """The figures by name; shares of all slots of held blocks, but for held_share, which is of the pool."""
    least = sum(len(turn.prompt) + turn.max_tokens - 1 for each in workload.conversations for turn in each.turns)
    return {
        "useful_share": played.slots.useful,
        **{f"{name}_share": share for name, share in played.slots.shares(played.slots.total).items()},
        "useful_share_of_tails_alone": floor(workload, BLOCK_SIZE),
        "held_share": played.held / played.seconds / (workload.cache_tokens // BLOCK_SIZE),
        "seconds": played.seconds,
        "steps": played.steps,
        "sequences_a_step": played.sequences / played.steps,
        "tokens_computed": played.tokens,
        "tokens_computed_to_needed": played.tokens / least,
        "preemptions": played.preemptions,
        "messages": played.messages,
        "waited_steps": played.waits,
        "waited_seconds": played.waited_seconds,
    }


def main(
    fixed_ms: Annotated[float, typer.Option(help="What a step takes, whatever is in it.")] = 1e3 * FLOAT32.fixed,
    row_ms: Annotated[float, typer.Option(help="What each token of a step takes.")] = 1e3 * FLOAT32.row,
    round_trip_ms: Annotated[float, typer.Option(help="What a message takes.")] = 1e3 * ROUND_TRIP_SECONDS,
    lease_blocks: Annotated[int | None, typer.Option(help="Spare blocks at most; else a server's default.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plays workload D and says what the slots of held blocks were for."""
    workload = build("D")
    time = StepTime(fixed_ms / 1e3, row_ms / 1e3)
    figures = report(workload, play(workload, time, round_trip_ms / 1e3, lease_blocks))
    show(figures, as_json)


if __name__ == "__main__":
    typer.run(main)
