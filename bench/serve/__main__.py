"""Octavo and the peers that are installed, on the same model, prompts and machine, in turns.

    make serve-peers PEERS=DIR
    python -m bench.serve --peers DIR --json serve.json --out serve.png

What --json has already is not run again, so a comparison that was stopped goes on. Each system runs in a process of its
own; a round gives each workload to one system after another. Nothing else should run meanwhile.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from bench.serve.cpu import CpuMeter
from bench.serve.figures import NOISE_CORES, Figures, Results, figures_of
from bench.serve.fleet import Fleet
from bench.serve.plot import plot
from bench.serve.report import report
from bench.serve.system import Run
from bench.serve.systems import DEFAULT, SYSTEMS
from bench.serve.workloads import NAMES, Workload, build
from services.supervisor import Interrupted, raise_on_signals

QUIET_SECONDS = 1.0


def serve(
    peers: Annotated[Path | None, typer.Option(help="Where make serve-peers has put the peers.")] = None,
    out: Annotated[Path | None, typer.Option(help="A picture of the ratios, PNG or SVG.")] = None,
    json: Annotated[Path | None, typer.Option(help="Keeps the figures; what it has already is not run again.")] = None,
    systems: Annotated[str, typer.Option(help=f"Of {', '.join(SYSTEMS)}.")] = ",".join(DEFAULT),
    workloads: Annotated[str, typer.Option(help=f"Of {', '.join(NAMES)}.")] = "A,B,C",
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    limit: Annotated[int, typer.Option(help="Conversations of each workload, at most; 0: all.", min=0)] = 0,
    patience: Annotated[float, typer.Option(help="Seconds to wait for a quiet machine before each run.")] = 30,
) -> None:
    """Compares systems and prints what it finds."""
    chosen = _names(systems, SYSTEMS)
    built = [build(name).cut(limit) for name in _names(workloads, NAMES)]
    with _kept(json) as path:
        results = Results.load(path, machine())
        for stage in _stages(built):
            with Fleet(peers) as fleet:
                for figures in compare(stage, chosen, rounds, results, fleet, patience):
                    results.runs.append(figures)
                    results.save(path)
                    print(_line(figures), file=sys.stderr, flush=True)
        print(report(results))
        if out is not None:
            plot(results, out)


def compare(
    workloads: Sequence[Workload], systems: Sequence[str], rounds: int, results: Results, fleet: Fleet, patience: float
) -> Iterator[Figures]:
    """Workloads with one cache size on systems that play them, round by round. Yields what `results` has not."""
    todo = [
        (number, workload, name)
        for number in range(rounds)
        for workload in workloads
        for name in systems
        if workload.name in SYSTEMS[name].plays and not results.has(name, workload.name, number)
    ]
    first: dict[str, Run] = {}
    for number, workload, name in todo:
        if (system := fleet.system(name, workload)) is None:
            continue
        results.versions[name] = system.versions
        wait_until_quiet(patience)
        if (run := fleet.run(name, workload)) is not None:
            yield figures_of(name, workload.name, number, run, first.setdefault(workload.name, run))


def wait_until_quiet(patience: float) -> None:
    """Returns after a second in which others used few cores, or after `patience` seconds."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        with CpuMeter() as meter:
            time.sleep(QUIET_SECONDS)
        if meter.use.foreign_cores < NOISE_CORES:
            return


def machine() -> dict[str, str]:
    """What is measured on."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].partition(":")[2].strip() if names else platform.machine()
    return {
        "cpu": cpu,
        "cores": str(len(os.sched_getaffinity(0))),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _stages(workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Workloads by the cache size that they want."""
    sizes = dict.fromkeys(each.cache_tokens for each in workloads)
    return [[each for each in workloads if each.cache_tokens == size] for size in sizes]


def _names(given: str, known: Collection[str]) -> list[str]:
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"there is no {', '.join(unknown)}")
    return names


@contextmanager
def _kept(path: Path | None) -> Iterator[Path]:
    """The file for the figures, or one that goes away."""
    if path is not None:
        yield path
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "serve.json"


def _line(figures: Figures) -> str:
    mark = " *" if figures.is_noisy else ""
    return (
        f"{figures.workload} {figures.system}, round {figures.round}: {figures.output_rate:.1f} output tokens/s, "
        f"TTFT {figures.ttft_ms:.0f} ms, {figures.between_ms:.1f} ms between tokens, "
        f"others used {figures.foreign_cores:.2f} cores{mark}"
    )


if __name__ == "__main__":
    raise_on_signals()
    try:
        typer.run(serve)
    except Interrupted:
        sys.exit("stopped; what was measured is in the --json file, and the same command goes on")
