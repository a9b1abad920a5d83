"""Tables of figures, ratios between systems in the same rounds, and whether the project's targets are met."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.serve.figures import NOISE_CORES, Figures, Results, mean_extra
from bench.serve.systems import SYSTEMS

FIGURE_NAMES = {"output_rate": "output tokens/s", "ttft_ms": "TTFT ms", "between_ms": "ms between tokens"}
HEADS = ("output tokens/s", "TTFT ms", "ms between tokens", "p95", "same tokens", "others' cores")

OWN = {
    "overhead_share": "of the engine's steps, not the model:",
    "useful_share": "of the slots of held blocks, for tokens that there are:",
    "stored_share": "stored by the books:",
}
"""What Octavo tells of itself, by the name of an extra figure."""


@dataclass(frozen=True, slots=True)
class Target:
    """Octavo's figure over a peer's on a workload: at least this where more is better, else at most."""

    workload: str
    figure: str
    peer: str
    ratio: float

    def is_met(self, found: float) -> bool:
        return found >= self.ratio if self.figure == "output_rate" else found <= self.ratio

    def of(self, pair: tuple[str, str]) -> str:
        bound = "at least" if self.figure == "output_rate" else "at most"
        return f"{self.workload}, {FIGURE_NAMES[self.figure]}, {' / '.join(pair)}: {bound} {self.ratio:g}"


TARGETS = (
    Target("A", "output_rate", "vllm", 1.3),
    Target("B", "output_rate", "vllm", 1.5),
    Target("C", "between_ms", "vllm", 0.4),
    Target("C", "ttft_ms", "vllm", 1.0),
    Target("D", "output_rate", "vllm", 1.5),
    Target("E", "output_rate", "vllm", 1.5),
    Target("A", "output_rate", "llama", 2.0),
    Target("B", "output_rate", "llama", 6.0),
    Target("C", "between_ms", "llama", 1.2),
    Target("E", "output_rate", "llama", 6.0),
    Target("A", "output_rate", "hf", 16.0),
)
PAIRS = {
    "vllm": (
        ("octavo", "vllm"),
        ("octavo-w4a8-kv16", "vllm-bfloat16"),
        ("octavo-w8a8-kv16", "vllm-bfloat16"),
    ),
    "llama": (("octavo", "llama-q4"), ("octavo-w4a8-kv16", "llama-q4"), ("octavo-w8a8-kv16", "llama-q4")),
    "hf": (("octavo", "hf"),),
}
"""Which systems a peer's targets are for: exact arithmetic beside exact, forms that round beside those that do."""


def ratio(results: Results, system: str, other: str, workload: str, figure: str) -> float | None:
    """The median over rounds of system / other, each taken within one round; None where they share no round."""
    ours, others = ({each.round: each for each in results.of(name, workload)} for name in (system, other))
    found = [getattr(ours[number], figure) / getattr(others[number], figure) for number in ours.keys() & others.keys()]
    return median(found) if found else None


def pairs_of(results: Results) -> list[tuple[str, str]]:
    """Each peer that ran beside what it is compared with: as PAIRS say, others beside `octavo`."""
    ran = dict.fromkeys(each.system for each in results.runs)
    known = [pair for pairs in PAIRS.values() for pair in pairs]
    others = [name for name in ran if not name.startswith("octavo") and name not in {peer for _, peer in known}]
    return [pair for pair in (*known, *(("octavo", name) for name in others)) if ran.keys() >= set(pair)]


def report(results: Results) -> str:
    """All of it as text, in the form of Markdown tables."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    yield ", ".join(f"{name}: {value}" for name, value in results.machine.items())
    for name, versions in results.versions.items():
        yield f"{name} ({SYSTEMS[name].says}): " + ", ".join(f"{key} {value}" for key, value in versions.items())
    for workload in sorted({each.workload for each in results.runs}):
        yield ""
        yield from _table(results, workload)
    yield ""
    yield f"* a round beside which others used more than {NOISE_CORES} cores."
    yield ""
    yield from _targets(results)
    yield from _own(results)


def _table(results: Results, workload: str) -> Iterator[str]:
    systems = list(dict.fromkeys(each.system for each in results.runs if each.workload == workload))
    reference = systems[0]
    yield f"| {workload} | rounds | {' | '.join(HEADS)} | {reference} / this: rate | TTFT | between |"
    yield "|---" * (len(HEADS) + 5) + "|"
    for system in systems:
        runs = results.of(system, workload)
        ratios = (ratio(results, reference, system, workload, figure) for figure in FIGURE_NAMES)
        yield f"| {system} | {len(runs)} | {' | '.join((*_cells(runs), *map(_number, ratios)))} |"


def _cells(runs: Sequence[Figures]) -> tuple[str, ...]:
    mark = "*" if any(each.is_noisy for each in runs) else ""
    names = ("output_rate", "ttft_ms", "between_ms", "between_p95_ms")
    cells = [f"{_median(runs, name):.1f}{mark}" for name in names]
    return (*cells, f"{_median(runs, 'same_tokens'):.0%}", f"{_median(runs, 'foreign_cores'):.2f}")


def _targets(results: Results) -> Iterator[str]:
    lines = []
    for target in TARGETS:
        for pair in PAIRS[target.peer]:
            found = ratio(results, *pair, target.workload, target.figure)
            if found is not None:
                lines.append(f"| {target.of(pair)} | {found:.2f} | {'met' if target.is_met(found) else 'not met'} |")
    if lines:
        yield from ("| target | found | |", "|---|---|---|", *lines)


def _own(results: Results) -> Iterator[str]:
    """What Octavo tells of itself."""
    for system in dict.fromkeys(each.system for each in results.runs):
        for workload in sorted({each.workload for each in results.runs}):
            runs = results.of(system, workload)
            said = [f"{sentence} {value:.1%}" for name, sentence in OWN.items() if (value := mean_extra(runs, name))]
            if said:
                yield f"{system}, {workload}: " + ", ".join(said)


def _median(runs: Iterable[Figures], name: str) -> float:
    return median(float(getattr(each, name)) for each in runs)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
