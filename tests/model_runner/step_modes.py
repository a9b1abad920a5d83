"""How the engines of tests run their steps: each by itself, or one ahead of the other.

STEP_MODE=ahead (or worker) in the environment lets all engine tests run so; a few do in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from model_runner.engine_types import Executor
from model_runner.steps import InlineSteps, Steps, WorkerSteps


class StepMode(Enum):
    """SYNC: a step lands before the next is planned. AHEAD: after that, though it is done when it is launched, so that
    a test knows when; WORKER: the same on a thread of its own."""

    SYNC = "sync"
    AHEAD = "ahead"
    WORKER = "worker"

    @property
    def is_async(self) -> bool:
        return self is not StepMode.SYNC

    def steps(self, executor: Executor) -> Steps:
        return (WorkerSteps if self is StepMode.WORKER else InlineSteps)(executor)


_modes = [StepMode(os.environ.get("STEP_MODE", "sync"))]


def step_mode() -> StepMode:
    """The mode that engines are made in."""
    return _modes[-1]


@contextmanager
def in_mode(mode: StepMode) -> Iterator[None]:
    """Engines that are made within it run their steps so."""
    _modes.append(mode)
    try:
        yield
    finally:
        _modes.pop()
