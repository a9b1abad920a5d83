"""Checks every attention backend on a GPU, measures it, and says how it compares: `python -m bench.gpu --out gpu.json`.

It ends within --minutes, whatever breaks: each part runs in a process of its own, and what one of them loses the others
keep. `--device cpu --quick` runs all parts in small, to show that they run; its speeds mean nothing.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.gpu.parts import MARK, Figures, Task, command_of, run_apart, run_here
from bench.gpu.place import FULL, QUICK, Place
from bench.gpu.plan import Results, has_failed, run_all
from bench.gpu.report import table
from services.logging import configure_logging

ON_GPU = ("flashinfer", "flash_attn", "triton", "reference")
ON_CPU = ("cpu", "cpu_torch", "reference")
EXIT_WRONG = 1


def place_of(device: str, quick: bool) -> Place:
    """The device, with sizes for a GPU or in small."""
    return Place(torch.device(device), QUICK, 0.001) if quick else Place(torch.device(device), FULL, 1.0)


def why_not(device: torch.device, quick: bool) -> str | None:
    """Why nothing can be measured, in a sentence; None when it can."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return "There is no CUDA here; with --device cpu --quick all parts run in small."
    if device.type != "cuda" and not quick:
        return f"The sizes are those of a GPU; on {device} only --quick is of use."
    return None


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:N or cpu.")] = "cuda",
    minutes: Annotated[float, typer.Option(min=0.1, help="All of it takes no longer.")] = 9.5,
    quick: Annotated[bool, typer.Option("--quick", help="Everything tiny, in one process: whether it runs.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for the results, written after each part.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and no table.")] = False,
    part: Annotated[str, typer.Option(hidden=True)] = "",
    backend: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Checks and measures. Exit code 1 when a backend is wrong or a part broke."""
    configure_logging("warning", "json")
    if (refusal := why_not(torch.device(device), quick)) is not None:
        typer.echo(refusal, err=True)
        raise typer.Exit(2)
    place = place_of(device, quick)
    if part:
        # At the end once more, for then there may be a failure beside the figures.
        _show(run_here(Task(part, backend), place, _show))
        return
    run = partial(run_here, place=place) if quick else partial(_apart, device)
    backends = ON_GPU if place.is_gpu else ON_CPU
    workers = 1 if quick else len(backends)
    results = run_all(backends, 60 * minutes, run, partial(_note, out), workers)
    typer.echo(json.dumps(results) if as_json else table(results))
    if has_failed(results):
        raise typer.Exit(EXIT_WRONG)


def _show(figures: Figures) -> None:
    print(MARK + json.dumps(figures), flush=True)


def _apart(device: str, task: Task) -> Figures:
    return run_apart(command_of(task, device, quick=False), task.seconds)


def _note(out: Path | None, task: Task, results: Results) -> None:
    print(task.name, file=sys.stderr, flush=True)
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    typer.run(main)
