"""What a draw costs, and what the engine's step costs beside the model's: python -m bench.sampling.

First milliseconds for 16 rows of the demo model's logits, by the kernels, by numpy and by torch, in turns (see
bench.turns). Then 16 streams through the engine in this process: the phases of their decode steps, and what share of a
step is not the model's.
"""

from __future__ import annotations

import argparse
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels import machine
from bench.turns import LoadMeter, Way, clock_for, compare
from kvmanager import KvManager
from model_runner import native
from model_runner.batch import BatchEntry
from model_runner.engine import Engine
from model_runner.logit_edits import apply_edits
from model_runner.logit_rules import LogitRules
from model_runner.native import sampling as kernels
from model_runner.observer import PhaseSeconds, SilentObserver, StepReport
from model_runner.request import GenerateRequest, SamplingParams, StopConditions
from model_runner.sampling_cpu import logprobs_by_rows, sample_by_rows
from model_runner.sampling_device import logprobs_at_once, sample_at_once
from model_runner.sampling_rows import SamplingRows
from services.books_inprocess import InProcessBooks
from services.config import ModelRunnerSettings
from services.model_setup import Setup, set_up_model

ROWS, PROMPT_TOKENS, ANSWER_TOKENS = 16, 48, 64
TEXT = Path(__file__).parent.parent / "docs" / "eviction.md"
CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "temperature 1": SamplingParams(1.0),
    "temperature 0.8, top_k 50, top_p 0.95": SamplingParams(0.8, top_k=50, top_p=0.95),
    "temperature 0.8, top_p 0.95": SamplingParams(0.8, top_p=0.95),
    "the same, all penalties": SamplingParams(
        0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
}


class Phases(SilentObserver):
    """Seconds of the phases of all decode steps in which every stream takes part."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.steps = 0

    def on_step(self, report: StepReport) -> None:
        if report.sequences == ROWS and not report.prefill_tokens:
            self.seconds.update({name: getattr(report.phases, name) for name in PhaseSeconds.__slots__})
            self.steps += 1


def prompts_of(setup: Setup) -> list[list[int]]:
    """Pieces of a page of these docs."""
    ids = setup.tokenizer.encode(TEXT.read_text())
    return [ids[row * PROMPT_TOKENS : (row + 1) * PROMPT_TOKENS] for row in range(ROWS)]


def logits_after(setup: Setup, prompts: Sequence[Sequence[int]]) -> Tensor:
    blocks = -(-PROMPT_TOKENS // setup.memory.block_size)
    entries = [
        BatchEntry(prompt, 0, range(1 + row * blocks, 1 + (row + 1) * blocks), num_logits=1)
        for row, prompt in enumerate(prompts)
    ]
    return setup.executor.execute(entries, [])


def draws(logits: Tensor, prompts: Sequence[Sequence[int]], params: SamplingParams) -> dict[str, Way]:
    """One draw for each row, with the rules made anew from the counts that a sequence keeps."""
    rows = SamplingRows.of([params] * ROWS, range(ROWS), range(ROWS))
    requests = [GenerateRequest("r", tuple(prompt), params) for prompt in prompts]
    rules = [LogitRules.of(request, frozenset()) for request in requests]

    def edits() -> list:
        pairs = zip(rules, prompts, strict=True)
        return [None if each is None else each.edits(prompt, logits.shape[1]) for each, prompt in pairs]

    return {
        "kernels": lambda turn: kernels.draw(logits, rows, edits(), None),
        "numpy": lambda turn: sample_by_rows(apply_edits(logits, edits()), rows),
        "torch": lambda turn: sample_at_once(apply_edits(logits, edits()), rows),
    }


def log_probabilities(logits: Tensor) -> dict[str, Way]:
    tokens, counts, places = torch.zeros(ROWS, dtype=torch.int64), [5] * ROWS, torch.arange(ROWS)
    return {
        "kernels": lambda turn: kernels.logprobs(logits, places, tokens, counts),
        "numpy": lambda turn: logprobs_by_rows(logits, tokens, counts),
        "torch": lambda turn: logprobs_at_once(logits, tokens, counts),
    }


def run_streams(setup: Setup, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Phases:
    """All prompts at once through the engine."""
    phases, left, ended = Phases(), len(prompts), threading.Event()

    def take(items: Sequence) -> None:
        nonlocal left
        left -= sum(1 for item in items if item.usage is not None)
        if not left:
            ended.set()

    books = InProcessBooks(KvManager("bench"))
    engine = Engine(setup.executor, books, setup.tokenizer, setup.options, take, observer=phases)
    stop = StopConditions(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(str(number), tuple(prompt), replace(params, seed=number), stop))
    engine.start()
    ended.wait()
    engine.stop()
    return phases


def print_draws(logits: Tensor, prompts: Sequence[Sequence[int]], seconds: float, threads: int) -> None:
    print(f"milliseconds for {ROWS} rows of {logits.shape[1]} logits, {threads} thread(s):")
    timed = partial(compare, seconds=seconds, clock=clock_for(threads))
    for name, params in CASES.items():
        print_line(name, timed(draws(logits, prompts, params)))
    print_line("log-probabilities of 5 candidates", timed(log_probabilities(logits)))


def print_line(name: str, took: Mapping[str, float]) -> None:
    print(f"  {name}: " + ", ".join(f"{way} {1000 * each:.2f}" for way, each in took.items()))


def print_phases(name: str, phases: Phases) -> None:
    total = sum(phases.seconds.values())
    parts = ", ".join(f"{phase} {1000 * spent / phases.steps:.2f}" for phase, spent in phases.seconds.items())
    share = 1 - phases.seconds["forward"] / total
    print(f"  {name}: {1000 * total / phases.steps:.1f} ms a step ({parts}); not the model's: {share:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case of the draws")
    given = parser.parse_args()
    load = LoadMeter()
    setup = set_up_model(ModelRunnerSettings(log_format="json", kv_cache_memory=1 << 28, num_threads=given.threads))
    print(machine(native.need_library()))
    prompts = prompts_of(setup)
    print_draws(logits_after(setup, prompts), prompts, given.seconds, given.threads)
    print(f"{ROWS} streams through the engine, milliseconds:")
    for name in ("greedy", "temperature 0.8, top_p 0.95", "the same, all penalties"):
        print_phases(name, run_streams(setup, prompts, CASES[name]))
    print(load.read())


if __name__ == "__main__":
    main()
