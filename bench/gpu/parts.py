"""The parts by name, and how one is run: in this process, or in one of its own that may break, hang or be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench.gpu.attention import attention
from bench.gpu.correctness import correctness, shapes
from bench.gpu.machine import facts, speeds
from bench.gpu.place import Place
from bench.gpu.serving import huggingface, split
from bench.gpu.steps import steps

Figures = dict[str, object]

ALONE: dict[str, Callable[[Place], Iterator[Figures]]] = {"facts": facts, "speeds": speeds}
"""Parts about the device. A part yields its figures again and again, as there come more."""
BY_BACKEND: dict[str, Callable[[Place, str], Iterator[Figures]]] = {
    "correctness": correctness,
    "attention": attention,
    "steps": steps,
    "split": split,
    "huggingface": huggingface,
    "shapes": shapes,
}
"""Parts about one attention backend."""

MARK = "figures: "
"""Begins each line with what a process of a part has found so far; whatever else it prints is not ours."""
LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Task:
    """A part, of a backend if it is about one, that may take so many seconds."""

    part: str
    backend: str = ""
    seconds: float = 60.0

    @property
    def name(self) -> str:
        return f"{self.part} of {self.backend}" if self.backend else self.part


def run_here(task: Task, place: Place, tell: Callable[[Figures], None] = lambda figures: None) -> Figures:
    """The figures of a part; `failed` and the reason beside those that it had, when it raises. tell: gets them as they
    grow."""
    figures: Figures = {}
    try:
        part = BY_BACKEND[task.part](place, task.backend) if task.backend else ALONE[task.part](place)
        for figures in part:
            tell(figures)
    # Kernels and compilers raise what they like, and the other parts go on.
    except Exception as error:
        return figures | failed(f"{type(error).__name__}: {error}")
    return figures


def run_apart(command: Sequence[str], seconds: float) -> Figures:
    """What a process prints behind MARK at last. Beside it `failed` and the reason when it ends otherwise than well, or
    `cut_short` when it is not ready in time; that is a failure too if there is nothing yet.

    A kernel that writes where it must not breaks all later work of its process, and of no other. Compilers and servers
    that it has started end with it.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    is_late = False
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        is_late = True
        _kill_all(process)
        output, errors = process.communicate()
    finally:
        _kill_all(process)
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    figures: Figures = json.loads(lines[-1]) if lines else {}
    if is_late:
        reason = f"it was not ready after {seconds:.0f} s"
        return figures | {"cut_short": reason} if figures else failed(reason)
    if process.returncode or not figures:
        last = (errors.strip().splitlines() or ["no word"])[-1]
        return figures | failed(f"its process ended with {process.returncode}: {last}")
    return figures


def _kill_all(process: subprocess.Popen[str]) -> None:
    """Ends all that is left of a session of processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def failed(reason: str) -> Figures:
    """What stands in the place of figures."""
    return {"failed": " ".join(reason.split())[:LONGEST_REASON]}


def command_of(task: Task, device: str, quick: bool) -> list[str]:
    """The command line that runs one part."""
    command = [sys.executable, "-m", "bench.gpu", "--device", device, "--part", task.part, "--backend", task.backend]
    return [*command, "--quick"] if quick else command


def is_right(figures: Mapping[str, object]) -> bool:
    """Whether a backend's correctness part found it right."""
    return figures.get("ok") is True and "failed" not in figures
