"""What guessing tokens saves where answers quote their prompts: steps, and time, with it and without it.

    python -m bench.speculative --json

Eight documents, each with the request to sum it up and with the request to quote from it, are given to SmolLM2 in two
engines of one process. They share the weights, and take turns: all requests of a task to one engine, then to the other,
so many streams at a time. Decoding is greedy, and the answers must be equal. No client is in the way. Seconds of CPU
time, of all threads, say most where others use the machine too; with --threads 1 nobody waits in them.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Annotated

import typer

from bench.figures import show
from bench.turns import LoadMeter
from kvmanager.manager import KvManager
from model_runner.attention import create_backend
from model_runner.engine import Engine
from model_runner.engine_types import Executor, Failure
from model_runner.executor import TorchExecutor
from model_runner.request import Chunk, GenerateRequest, StopConditions, Usage
from services.books_inprocess import InProcessBooks
from services.config import ModelRunnerSettings, load_settings
from services.logging import configure_logging
from services.model_setup import Setup, set_up_model

DOCUMENTS = Path(__file__).parent / "data" / "documents.json"
TASKS = {
    "summary": "Summarize the following text in a few sentences.\n\n{}",
    "quote": "Repeat the most important sentences of the following text word for word.\n\n{}",
}
STREAMS = (1, 8)
PATIENCE_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: rounds of each task, and tokens of an answer at most; documents 0: all."""

    rounds: int = 3
    max_tokens: int = 128
    documents: int = 0


DEFAULTS = Plan()
QUICK = Plan(rounds=1, max_tokens=24, documents=2)


@dataclass(frozen=True, slots=True)
class Round:
    """All requests of a task in one engine: answers by document, and what they took; CPU seconds with their prompts.

    sequence_steps: steps, counted once for each sequence that got a token in them.
    """

    answers: dict[str, list[int]]
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    decode_seconds: float
    cpu_seconds: float

    @property
    def sequence_steps(self) -> int:
        return self.output_tokens - self.accepted_tokens

    @property
    def tokens_per_second(self) -> float:
        """Of a stream, from its first token on."""
        return (self.output_tokens - len(self.answers)) / self.decode_seconds


class _Side:
    """One engine, which runs some requests at a time."""

    def __init__(self, setup: Setup, executor: Executor, speculative_tokens: int, ngram: int) -> None:
        limits = replace(setup.options.limits, speculative_tokens=speculative_tokens, speculative_ngram=ngram)
        options = replace(setup.options, limits=limits)
        books = InProcessBooks(KvManager("bench"))
        self._engine = Engine(executor, books, setup.tokenizer, options, self._take)
        self._answers: dict[str, list[int]] = {}
        self._usages: list[Usage] = []
        self._free = threading.Semaphore(0)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            self._engine.stop()

    def round(self, prompts: Mapping[str, Sequence[int]], streams: int, max_tokens: int) -> Round:
        """Answers all prompts, so many at a time."""
        self._answers = {name: [] for name in prompts}
        self._usages = []
        started = process_time()
        for number, (name, prompt) in enumerate(prompts.items()):
            if number >= streams:
                self._await_one()
            request = GenerateRequest(
                name, tuple(prompt), stop=StopConditions(max_tokens=max_tokens), skip_cache_read=True
            )
            self._engine.submit(request)
        for _ in range(min(streams, len(prompts))):
            self._await_one()
        return Round(
            answers=self._answers,
            output_tokens=sum(usage.output_tokens for usage in self._usages),
            drafted_tokens=sum(usage.drafted_tokens for usage in self._usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in self._usages),
            decode_seconds=sum(usage.decode_seconds for usage in self._usages),
            cpu_seconds=process_time() - started,
        )

    def _await_one(self) -> None:
        assert self._free.acquire(timeout=PATIENCE_SECONDS), "a request does not end"

    def _take(self, items: Sequence[Chunk | Failure]) -> None:
        for item in items:
            if isinstance(item, Failure):
                raise RuntimeError(item.sentence)
            self._answers[item.request_id] += item.token_ids
            if item.usage is not None:
                self._usages.append(item.usage)
                self._free.release()


def measure(
    plan: Plan, speculative_tokens: int, ngram: int, streams: Sequence[int] = STREAMS, threads: int = 0
) -> dict[str, float]:
    """The figures by name: of each task, with so many streams at a time. threads: of the model, 0 for all cores."""
    given = {"log_format": "json", "kv_cache_memory": 1 << 28, "num_threads": threads}
    setup = set_up_model(load_settings(ModelRunnerSettings, given))
    backend = create_backend(setup.backend.name, setup.backend.shape)
    other = TorchExecutor(setup.loaded.model, backend, setup.options.facts.block_size, setup.backend.shape.device)
    without, guessing = _Side(setup, setup.executor, 0, ngram), _Side(setup, other, speculative_tokens, ngram)
    figures: dict[str, float] = {}
    with without.running(), guessing.running():
        for task in TASKS:
            prompts = _prompts(setup, task, plan.documents)
            for count in streams:
                rounds = [_pair((without, guessing), prompts, count, plan, number) for number in range(plan.rounds)]
                figures |= _figures(f"{task}_{count}", rounds)
    return figures


def _prompts(setup: Setup, task: str, documents: int) -> dict[str, list[int]]:
    texts = json.loads(DOCUMENTS.read_text(encoding="utf-8"))
    chosen = list(texts.items())[: documents or None]
    chats = {name: [{"role": "user", "content": TASKS[task].format(text)}] for name, text in chosen}
    tokenizer = setup.tokenizer
    return {
        name: tokenizer.encode(tokenizer.render_chat(chat), add_special_tokens=False) for name, chat in chats.items()
    }


def _pair(
    sides: tuple[_Side, _Side], prompts: Mapping[str, Sequence[int]], streams: int, plan: Plan, number: int
) -> tuple[Round, Round]:
    """A round without guesses and one with them, in turns first."""
    done = {side: side.round(prompts, streams, plan.max_tokens) for side in (sides[::-1] if number % 2 else sides)}
    without, guessing = (done[side] for side in sides)
    assert guessing.answers == without.answers, "guesses have changed an answer"
    return without, guessing


def _figures(name: str, rounds: list[tuple[Round, Round]]) -> dict[str, float]:
    without, guessing = rounds[0]
    return {
        f"tokens_{name}": guessing.output_tokens,
        f"tokens_per_step_without_{name}": without.output_tokens / without.sequence_steps,
        f"tokens_per_step_{name}": guessing.output_tokens / guessing.sequence_steps,
        f"drafted_per_token_{name}": guessing.drafted_tokens / guessing.output_tokens,
        f"acceptance_{name}": guessing.accepted_tokens / max(1, guessing.drafted_tokens),
        f"tokens_per_second_without_{name}": statistics.median(one.tokens_per_second for one, _ in rounds),
        f"tokens_per_second_{name}": statistics.median(other.tokens_per_second for _, other in rounds),
        f"speed_ratio_{name}": statistics.median(
            other.tokens_per_second / one.tokens_per_second for one, other in rounds
        ),
        f"cpu_ratio_{name}": statistics.median(one.cpu_seconds / other.cpu_seconds for one, other in rounds),
    }


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens guessed in a step, at most.")] = 8,
    ngram: Annotated[int, typer.Option(min=2, help="Tokens of the longest n-gram looked up.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; ratios are medians over them.")] = DEFAULTS.rounds,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = DEFAULTS.max_tokens,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads of the model; 0: all cores.")] = 0,
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Requests at a time; may be given again.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two short answers: whether it runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures what guessing saves."""
    configure_logging("warning", "json")
    load = LoadMeter()
    figures = measure(QUICK if quick else Plan(rounds, max_tokens), tokens, ngram, streams or STREAMS, threads)
    figures["load_cores"] = load.read().busy
    show(figures, as_json, digits=3)


if __name__ == "__main__":
    typer.run(main)
