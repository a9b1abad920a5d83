"""The command `soak`: real processes under random load and random faults, and the proof at the end."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli_common import EXIT_WRONG, run_or_exit_2
from services.soak.run import Plan, Report, soak

SEED_BITS = 32


def add_soak_command(app: typer.Typer) -> None:
    """Mounts the command."""
    app.command("soak", short_help="Prove that faults cost nothing.")(soak_command)


def soak_command(
    minutes: Annotated[float, typer.Option(min=0.05, max=10_000, help="Minutes of load and faults.")] = 2.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of load and faults. Unset: a new one.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Directory in which the processes' logs are left.")] = None,
) -> None:
    """Starts a KV manager and two runners of the demo's model, and disturbs them while users stream answers.

    Processes are killed and stopped; messages are lost, doubled, late, out of order; sessions are cut. In the end all
    answers must be those of the undisturbed run, the books must be right, nothing may be held and no stream may hang.
    Exit code 1 when something is wrong, with the seed that repeats it.
    """
    chosen = secrets.randbits(SEED_BITS) if seed is None else seed
    run_or_exit_2(lambda: _soak(Plan(chosen, minutes * 60), keep))


def _soak(plan: Plan, keep: Path | None) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]octavo soak --minutes {plan.seconds / 60:g} --seed {plan.seed}[/bold]")
    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as temporary:
        directory = keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(soak(plan, directory, lambda line: console.print(line, markup=False, soft_wrap=True)))
    _tell(console, plan, report)
    if report.found:
        raise typer.Exit(EXIT_WRONG)


def _tell(console: Console, plan: Plan, report: Report) -> None:
    """The summary; when something was wrong, what, and how to repeat it."""
    ends, hits, counts = (
        ", ".join(f"{what}: {count}" for what, count in sorted(each.items()))
        for each in (report.ends, report.hits, report.counts)
    )
    console.print(f"{sum(report.ends.values())} requests: {ends}; {report.tokens} tokens", markup=False, soft_wrap=True)
    console.print(f"the runners, since they were started last: {counts}", markup=False, soft_wrap=True)
    console.print(f"{len(plan.faults())} faults; {hits or 'no message was disturbed'}", markup=False, soft_wrap=True)
    if not report.found:
        console.print("[green]all answers are right, the books are right, nothing is held[/green]")
        return
    for sentence in report.found:
        console.print(sentence, style="red", markup=False, soft_wrap=True)
    console.print("the faults were:")
    for fault in plan.faults():
        console.print(str(fault), markup=False, soft_wrap=True)
    console.print(f"repeat it: octavo soak --minutes {plan.seconds / 60:g} --seed {plan.seed}", style="bold")
