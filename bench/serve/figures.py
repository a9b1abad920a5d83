"""The figures of one run, and the file that keeps them, so that a comparison can go on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.serve.player import Answer
from bench.serve.system import Run

NOISE_CORES = 0.2
"""Cores that others may use beside a run before its figures are marked."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One system, one workload, one round.

    Rates in output tokens/s from the first request to the last token; ttft and between (tokens of one answer) in ms,
    the median over answers and over gaps, p95 of the gaps. answers: how many there are, fewer where a part was played.
    same_tokens: the share up to where its answers differ from the first system's. extra: what only this one tells.
    """

    system: str
    workload: str
    round: int
    answers: int
    output_rate: float
    ttft_ms: float
    between_ms: float
    between_p95_ms: float
    seconds: float
    own_cores: float
    foreign_cores: float
    same_tokens: float
    extra: dict[str, float]

    @property
    def is_noisy(self) -> bool:
        return self.foreign_cores > NOISE_CORES

    @property
    def key(self) -> tuple[str, str, int]:
        return self.system, self.workload, self.round


def figures_of(system: str, workload: str, round_number: int, run: Run, reference: Run) -> Figures:
    """The figures of a run in which some answer has two tokens. reference: what the first system made of it."""
    return Figures(
        system,
        workload,
        round_number,
        len(run.answers),
        **latencies(run.answers),
        seconds=run.cpu.seconds,
        own_cores=run.cpu.own_cores,
        foreign_cores=run.cpu.foreign_cores,
        same_tokens=same_tokens(run.answers, reference.answers),
        extra=run.extra,
    )


def same_tokens(answers: Sequence[Answer], reference: Sequence[Answer]) -> float:
    """Of the tokens of `answers`, the share before the first one that differs from the same answer of `reference`."""
    same = 0
    for answer, other in zip(answers, reference, strict=False):
        pairs = zip(answer.token_ids, other.token_ids, strict=True)
        same += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same / sum(len(answer.token_ids) for answer in answers)


def latencies(answers: Sequence[Answer]) -> dict[str, float]:
    """Rate, time to the first token and times between tokens of some answers, by the names in Figures."""
    gaps = sorted(1e3 * (later - earlier) for each in answers for earlier, later in pairwise(each.times))
    began, ended = min(each.asked for each in answers), max(each.times[-1] for each in answers)
    return {
        "output_rate": sum(len(each.times) for each in answers) / (ended - began),
        "ttft_ms": median(1e3 * (each.times[0] - each.asked) for each in answers),
        "between_ms": median(gaps),
        "between_p95_ms": gaps[int(len(gaps) * 0.95)],
    }


@dataclass(slots=True)
class Results:
    """All runs so far; machine and versions by name."""

    machine: dict[str, str]
    versions: dict[str, dict[str, str]]
    runs: list[Figures]

    @staticmethod
    def load(path: Path, machine: dict[str, str]) -> Results:
        """What the file has, or nothing yet. Raises ValueError for figures of another machine."""
        if not path.exists():
            return Results(machine, {}, [])
        found: dict[str, Any] = json.loads(path.read_text())
        if found["machine"] != machine:
            raise ValueError(f"{path} has figures of another machine ({found['machine']}); give another --json")
        return Results(found["machine"], found["versions"], [Figures(**each) for each in found["runs"]])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def has(self, system: str, workload: str, round_number: int) -> bool:
        return (system, workload, round_number) in {each.key for each in self.runs}

    def of(self, system: str, workload: str) -> list[Figures]:
        """The rounds of a system on a workload, in order."""
        found = [each for each in self.runs if (each.system, each.workload) == (system, workload)]
        return sorted(found, key=lambda each: each.round)


def mean_extra(runs: Sequence[Figures], name: str) -> float | None:
    """The mean of an extra figure over rounds; None where there is none."""
    values = [each.extra[name] for each in runs if name in each.extra]
    return fmean(values) if values else None
