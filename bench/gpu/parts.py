"""The parts by name, and how one is run: in this process, or in one of its own that may break, hang or be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.gpu.attention import attention
from bench.gpu.correctness import correctness
from bench.gpu.machine import facts, speeds
from bench.gpu.place import Place
from bench.gpu.serving import huggingface, split
from bench.gpu.steps import steps

Figures = dict[str, object]

ALONE: dict[str, Callable[[Place], Figures]] = {"facts": facts, "speeds": speeds}
"""Parts about the device."""
BY_BACKEND: dict[str, Callable[[Place, str], Figures]] = {
    "correctness": correctness,
    "attention": attention,
    "steps": steps,
    "split": split,
    "huggingface": huggingface,
}
"""Parts about one attention backend."""

MARK = "figures: "
"""Begins the line with what a process of a part found; whatever else it prints is not ours."""
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


def run_here(task: Task, place: Place) -> Figures:
    """The figures of a part; `failed` and the reason when it raises."""
    try:
        if task.backend:
            return BY_BACKEND[task.part](place, task.backend)
        return ALONE[task.part](place)
    # Kernels and compilers raise what they like, and the other parts go on.
    except Exception as error:
        return failed(f"{type(error).__name__}: {error}")


def run_apart(command: Sequence[str], seconds: float) -> Figures:
    """What a process prints behind MARK; `failed` and the reason when it ends without, or not in time.

    A kernel that writes where it must not breaks all later work of its process, and of no other.
    """
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return failed(f"it was not ready after {seconds:.0f} s")
    for line in ended.stdout.splitlines():
        if line.startswith(MARK):
            found: Figures = json.loads(line.removeprefix(MARK))
            return found
    last = (ended.stderr.strip().splitlines() or ["no word"])[-1]
    return failed(f"its process ended with {ended.returncode}: {last}")


def failed(reason: str) -> Figures:
    """What stands in the place of figures."""
    return {"failed": " ".join(reason.split())[:LONGEST_REASON]}


def command_of(task: Task, device: str, quick: bool) -> list[str]:
    """The command line that runs one part."""
    command = [sys.executable, "-m", "bench.gpu", "--device", device, "--part", task.part, "--backend", task.backend]
    return [*command, "--quick"] if quick else command


def is_right(figures: Mapping[str, object]) -> bool:
    """Whether a backend's correctness part found it right."""
    return figures.get("ok") is True
