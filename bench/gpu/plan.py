"""What is run in which order, so that what matters most is there when the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from bench.gpu.parts import Figures, Task, is_right

Results = dict[str, dict[str, Figures]]
"""Figures by part, then by backend; '' for parts about the device."""
Run = Callable[[Task], Figures]

FIRST_COMPILE_SECONDS = 150.0
"""FlashInfer compiles its kernels when they are first wanted."""


def run_all(backends: Sequence[str], seconds: float, run: Run, done: Callable[[Task, Results], None]) -> Results:
    """Runs the parts until the time is over; done() is told after each. What there was no time for says so.

    Only backends that are right are measured. Whole steps, the split and Hugging Face's generate are measured on the
    first of them, and steps on the others in what time is left.
    """
    end = time.monotonic() + seconds
    results: Results = {}

    def take(task: Task) -> Figures:
        left = end - time.monotonic()
        if left <= 0:
            figures: Figures = {"skipped": f"the {seconds:.0f} s were over"}
        else:
            figures = run(Task(task.part, task.backend, min(task.seconds, left)))
        results.setdefault(task.part, {})[task.backend] = figures
        done(task, results)
        return figures

    take(Task("facts"))
    take(Task("speeds"))
    right = [name for name in backends if is_right(take(Task("correctness", name, FIRST_COMPILE_SECONDS)))]
    for name in right:
        take(Task("attention", name, 60))
    for name in right[:1]:
        take(Task("steps", name, 120))
        take(Task("split", name, 120))
        take(Task("huggingface", name, 180))
    for name in right[1:]:
        take(Task("steps", name, 90))
    return results


def has_failed(results: Mapping[str, Mapping[str, Figures]]) -> bool:
    """Whether a part broke, or a backend gives wrong results."""
    each = [figures for part in results.values() for figures in part.values()]
    return any("failed" in figures or figures.get("wrong") for figures in each)
