"""What is run in which order, so that what matters most is there when the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.gpu.parts import Figures, Task, is_right

Results = dict[str, dict[str, Figures]]
"""Figures by part, then by backend; '' for parts about the device."""
Run = Callable[[Task], Figures]

FIRST_COMPILE_SECONDS = 300.0
"""FlashInfer compiles its kernels when they are first wanted: for the served model's shape that can take minutes."""
TABLE_SECONDS = 120.0


def run_all(
    backends: Sequence[str], seconds: float, run: Run, done: Callable[[Task, Results], None], workers: int = 1
) -> Results:
    """Runs the parts until the time is over; done() is told after each. What there was no time for says so.

    Only backends that are right in the served model's shape are measured. Whole steps, the split and Hugging Face's
    generate are measured on the first of them, and steps on the others in what time is left; other shapes come last,
    for they want kernels of their own. workers: parts about correctness that run at a time, which are not timed.
    """
    end = time.monotonic() + seconds
    results: Results = {}

    def figures_of(task: Task) -> Figures:
        left = end - time.monotonic()
        if left <= 0:
            return {"skipped": f"the {seconds:.0f} s were over"}
        return run(Task(task.part, task.backend, min(task.seconds, left)))

    def take(*tasks: Task) -> list[Figures]:
        with ThreadPoolExecutor(workers) as pool:
            found = []
            for task, figures in zip(tasks, pool.map(figures_of, tasks), strict=True):
                results.setdefault(task.part, {})[task.backend] = figures
                done(task, results)
                found.append(figures)
        return found

    take(Task("facts"))
    take(Task("speeds"))
    found = take(*(Task("correctness", name, FIRST_COMPILE_SECONDS) for name in backends))
    right = [name for name, figures in zip(backends, found, strict=True) if is_right(figures)]
    for name in right[:1]:
        take(Task("steps", name, 120))
    for name in right:
        take(Task("attention", name, 60))
    for name in right[:1]:
        take(Task("split", name, 120))
        take(Task("huggingface", name, 120))
    for name in right[1:]:
        take(Task("steps", name, 60))
    take(*(Task("shapes", name, TABLE_SECONDS) for name in right))
    return results


def has_failed(results: Mapping[str, Mapping[str, Figures]]) -> bool:
    """Whether a part broke, or a backend gives wrong results."""
    each = [figures for part in results.values() for figures in part.values()]
    return any("failed" in figures or figures.get("wrong") for figures in each)
