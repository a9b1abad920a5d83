"""What it costs that the books are kept by a process of their own: decode throughput beside the same engine with
in-process books.

    python -m bench.split --json

Both engines live in one process and run by turns, some steps each, in the same state: that many streams that decode.
The model is the demo's; for the last case its step is replaced by a sleep of 5 ms, which is a fast GPU's step. No
client is in the way. A pair is some turns of both sides; a ratio is the median, over the pairs, of the throughput with
the sidecar over that without.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import torch
import typer

from bench.figures import show
from bench.sidecar import kv_manager
from bench.sleeping import SleepingExecutor
from bench.split_turns import Meter, Turns
from bench.turns import LoadMeter, quantile
from kvmanager.manager import KvManager
from model_runner.attention import create_backend
from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder, KvBooks
from model_runner.device_copies import Send
from model_runner.engine import Engine
from model_runner.engine_types import Executor, Failure
from model_runner.executor import TorchExecutor
from model_runner.observer import SilentObserver, StepReport
from model_runner.request import Chunk, GenerateRequest, StopConditions
from services.books_inprocess import InProcessBooks
from services.config import ModelRunnerSettings, load_settings
from services.logging import configure_logging
from services.model_setup import Setup, set_up_model
from services.session.dial import SessionDial
from services.session.session import SilentWatch
from services.session_books import SessionBooks

BLOCK_SIZE = 16
SLEEP_SECONDS = 0.005
PROMPT_TOKENS = range(17, 33)
"""Lengths of prompts: streams don't come to the ends of their blocks in the same step."""
ORDER = "issi" * 2
"""Turns of a pair: i with in-process books, s with a session."""
ADMISSION_STEPS = 128
"""On a busy machine, the first stream decodes for so many steps at most before the last one is admitted."""
PATIENCE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: pairs of turns, and steps in a turn (of the sleeping engine, and of the real model)."""

    pairs: int = 5
    steps: int = 16
    sleeping_steps: int = 64


DEFAULTS = Plan()
QUICK = Plan(pairs=1, steps=4, sleeping_steps=4)


@dataclass(frozen=True, slots=True)
class Case:
    """So many streams of the real model, or of one that sleeps."""

    name: str
    streams: int
    sleeps: bool = False


CASES = (Case("16", 16), Case("64", 64), Case("sleep_256", 256, sleeps=True))
QUICK_CASES = (Case("16", 2), Case("64", 3), Case("sleep_256", 4, sleeps=True))


class _Side(SilentObserver, SilentWatch):
    """One engine with its books. It asks for its turn before each step in which all streams decode."""

    def __init__(self, name: str, setup: Setup, executor: Executor, streams: int) -> None:
        self._name = name
        self._streams = streams
        self._executor = executor
        self._setup = setup
        self._turns: Turns | None = None
        self._ends = threading.Semaphore(0)
        self.engine: Engine | None = None

    @contextmanager
    def running(self, books: KvBooks) -> Iterator[None]:
        """Its engine, over these books, with steps as a server's: on a GPU those of its stream."""
        steps = replace(self._setup, executor=self).steps()
        engine = self.engine = Engine(
            self, books, self._setup.tokenizer, self._setup.options, self._take, observer=self, steps=steps
        )
        engine.start()
        try:
            yield
        finally:
            engine.stop()

    def begin(self, turns: Turns, num_tokens: int) -> None:
        """New streams, of so many tokens each, which wait for their turns as soon as all of them decode."""
        assert self.engine is not None
        self._turns = turns
        rng = Random(5)
        for number in range(self._streams):
            length = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
            prompt = tuple(rng.choices(range(min(1000, self._setup.limits.vocab_size)), k=length))
            stop = StopConditions(max_tokens=num_tokens, ignore_eos=True)
            self.engine.submit(GenerateRequest(f"r{number}", prompt, stop=stop, skip_cache_read=True))

    def end(self) -> None:
        """Ends all streams."""
        assert self.engine is not None
        self.engine.abort([f"r{number}" for number in range(self._streams)])
        for _ in range(self._streams):
            assert self._ends.acquire(timeout=PATIENCE_SECONDS), "a stream does not end"

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> torch.Tensor:
        """The model's step, when it is this side's turn."""
        self._await_turn(entries)
        return self._executor.execute(entries, copies)

    @property
    def device(self) -> torch.device:
        return self._setup.backend.shape.device

    def follow(
        self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder], tokens: torch.Tensor | None, send: Send
    ) -> torch.Tensor:
        """The same of a step in the stream: a turn ends when the step after its last is to be launched."""
        self._await_turn(entries)
        assert isinstance(self._executor, TorchExecutor), "what sleeps has no stream"
        return self._executor.follow(entries, copies, tokens, send)

    def _await_turn(self, entries: Sequence[BatchEntry]) -> None:
        turns = self._turns
        if turns is not None and sum(len(entry.token_ids) for entry in entries) == len(entries) == self._streams:
            turns.step(self._name)

    def on_step(self, report: StepReport) -> None:
        meter = self._meter()
        if meter is not None:
            meter.books.append(report.phases.kv)

    def on_wait(self, seconds: float) -> None:
        meter = self._meter()
        if meter is not None:
            meter.waits.append(seconds)

    def _meter(self) -> Meter | None:
        turns = self._turns
        return turns.meters[self._name] if turns is not None and turns.is_on(self._name) else None

    def _take(self, items: Sequence[Chunk | Failure]) -> None:
        for item in items:
            if isinstance(item, Failure):
                raise RuntimeError(item.sentence)
            if item.usage is not None:
                self._ends.release()


def measure(case: Case, plan: Plan, model: Path | None = None) -> dict[str, float]:
    """The figures of one case by name, milliseconds where the name ends in _ms."""
    return measure_with(_set_up(case, plan, model), case, plan)


def num_tokens_of(case: Case, plan: Plan) -> int:
    """Tokens of each stream's answer."""
    steps = plan.sleeping_steps if case.sleeps else plan.steps
    return steps * ORDER.count("s") + ADMISSION_STEPS + case.streams // 8


def blocks_of(case: Case, plan: Plan) -> int:
    """Blocks with room for all streams and a lease."""
    return case.streams * (-(-(PROMPT_TOKENS[-1] + num_tokens_of(case, plan)) // BLOCK_SIZE) + 2) + 64


def measure_with(setup: Setup, case: Case, plan: Plan) -> dict[str, float]:
    """The same of a model that is loaded, with a cache of blocks_of() blocks of BLOCK_SIZE tokens."""
    steps = plan.sleeping_steps if case.sleeps else plan.steps
    num_tokens = num_tokens_of(case, plan)
    with kv_manager() as address:
        executors = _executors(setup, case)
        inside = _Side("i", setup, executors[0], case.streams)
        beside = _Side("s", setup, executors[1], case.streams)
        link = SessionDial(address)
        books = SessionBooks(link, lease_blocks=_lease(setup, case), watch=beside)
        with inside.running(InProcessBooks(KvManager("bench"))), beside.running(books):
            pairs = [_pair((inside, beside), steps, num_tokens) for _ in range(plan.pairs)]
    return _figures(case, pairs)


def _pair(sides: tuple[_Side, _Side], steps: int, num_tokens: int) -> dict[str, Meter]:
    turns = Turns(ORDER, steps)
    for side in sides:
        side.begin(turns, num_tokens)
    turns.wait()
    for side in sides:
        side.end()
    return turns.meters


def _figures(case: Case, pairs: list[dict[str, Meter]]) -> dict[str, float]:
    name = case.name
    totals = {side: sum((pair[side] for pair in pairs), Meter()) for side in "is"}
    figures = {f"ratio_{name}": statistics.median(pair["i"].wall / pair["s"].wall for pair in pairs)}
    for side, which in (("i", "in_process"), ("s", "sidecar")):
        meter = totals[side]
        figures |= {
            f"tokens_per_second_{name}_{which}": case.streams * meter.steps / meter.wall,
            f"step_p50_{name}_{which}_ms": 1000 * quantile(meter.cycles, 0.5),
            f"engine_cpu_{name}_{which}_ms": 1000 * meter.thread / meter.steps,
            f"process_cpu_{name}_{which}_ms": 1000 * meter.process / meter.steps,
            f"books_p50_{name}_{which}_ms": 1000 * quantile(meter.books, 0.5),
            f"books_p99_{name}_{which}_ms": 1000 * quantile(meter.books, 0.99),
        }
    figures[f"waited_share_{name}"] = len(totals["s"].waits) / totals["s"].steps
    figures[f"wait_p99_{name}_ms"] = 1000 * quantile(_all_waits(totals["s"]), 0.99)
    return figures


def _all_waits(meter: Meter) -> list[float]:
    return meter.waits + [0.0] * (meter.steps - len(meter.waits))


def _set_up(case: Case, plan: Plan, model: Path | None) -> Setup:
    """The model, with room for all streams and a lease: every other block is cached, as in a server after a while."""
    blocks = blocks_of(case, plan)
    given = {
        "num_blocks": 2 if case.sleeps else blocks,
        "block_size": BLOCK_SIZE,
        "max_sequences": case.streams,
        "log_format": "json",
    }
    setup = set_up_model(load_settings(ModelRunnerSettings, given | ({"model": str(model)} if model else {})))
    facts = replace(setup.options.facts, num_blocks=blocks)
    longest = (blocks - 1) * BLOCK_SIZE
    return replace(setup, options=replace(setup.options, facts=facts, max_sequence_tokens=longest))


def _lease(setup: Setup, case: Case) -> int:
    """The default of the model runner."""
    settings = load_settings(ModelRunnerSettings, {"max_sequences": case.streams})
    return settings.lease_of(setup.options.facts.num_blocks)


def _executors(setup: Setup, case: Case) -> tuple[Executor, Executor]:
    """One for each side; the real ones share the weights."""
    if case.sleeps:
        sleeping = partial(SleepingExecutor, SLEEP_SECONDS, vocab_size=64, token_id=40)
        return sleeping(), sleeping()
    backend = create_backend(setup.backend.name, setup.backend.shape)
    other = TorchExecutor(setup.loaded.model, backend, BLOCK_SIZE, setup.backend.shape.device)
    return setup.executor, other


def main(
    pairs: Annotated[int, typer.Option(min=1, help="Pairs; the figures are their medians.")] = DEFAULTS.pairs,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the real model in a turn.")] = DEFAULTS.steps,
    sleeping_steps: Annotated[int, typer.Option(min=1, help="Steps of the sleeping one.")] = DEFAULTS.sleeping_steps,
    model: Annotated[Path | None, typer.Option(help="A model directory or file; else SmolLM2.")] = None,
    only: Annotated[str, typer.Option(help="One case: 16, 64 or sleep_256.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="All of it with a few streams: whether it runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures what the split costs a decode step."""
    configure_logging("warning", "json")
    plan = QUICK if quick else Plan(pairs, steps, sleeping_steps)
    meter = LoadMeter()
    figures: dict[str, float] = {}
    for case in QUICK_CASES if quick else CASES:
        if not only or only == case.name:
            figures |= measure(case, plan, model)
    figures |= meter.read().figures()
    show(figures, as_json)


if __name__ == "__main__":
    typer.run(main)
