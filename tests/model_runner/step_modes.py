"""How the engines of tests run their steps: each by itself, or one ahead of the other.

STEP_MODE=ahead (or worker) in the environment lets all engine tests run so; a few do in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

from model_runner.engine_types import Executor
from model_runner.steps import InlineSteps, Launched, StepOrder, Steps, WorkerSteps


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
        return {StepMode.SYNC: InlineSteps, StepMode.AHEAD: OverwritingSteps, StepMode.WORKER: WorkerSteps}[self](
            executor
        )


class OverwritingSteps(InlineSteps):
    """As the next step may: the logits of the one in flight are nonsense as soon as it is launched."""

    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        launched = super().launch(order, before)
        if before is not None:
            with suppress(Exception):
                before.wait().logits.fill_(float("nan"))
        return launched


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
