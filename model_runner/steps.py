"""Where steps of the model run: on the engine's thread, or behind it on a thread of their own, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder
from model_runner.draws import Drawn, Draws
from model_runner.engine_types import Executor


class StepAbandoned(Exception):
    """The step before, which this one goes on from, has failed."""


@dataclass(frozen=True, slots=True)
class StepOrder:
    """What a step computes. draws: those of the step itself; None when the engine draws, once the step is done."""

    entries: Sequence[BatchEntry]
    copies: Sequence[CopyOrder]
    draws: Draws | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """logits: float32 [rows that the entries want, vocabulary]; the next step may overwrite them."""

    logits: Tensor
    drawn: Drawn | None


class Launched(Protocol):
    """A step that runs, or will."""

    def wait(self) -> StepResult:
        """Returns once it is done. Raises what it raised."""
        ...


class Steps(Protocol):
    """Runs steps in the order of their launches, copies and writes included. Called from the engine's thread."""

    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        """Starts a step. before: the step in flight, if there is one, which entries may follow.

        A step behind one that fails is not carried out, or of no use.
        """
        ...

    def close(self) -> None:
        """No more steps come."""
        ...


class InlineSteps:
    """A step is done when it is launched. What it raises is kept for wait()."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        step = _HostStep(self._executor, order, before)
        step.run()
        return step

    def close(self) -> None:
        pass


class WorkerSteps:
    """Steps run on one thread, so that the engine's can plan and deliver meanwhile."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, "octavo-steps")

    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        step = _HostStep(self._executor, order, before)
        self._thread.submit(step.run)
        return step

    def close(self) -> None:
        self._thread.shutdown()


class _HostStep:
    """A step whose draws are on the host as soon as it is done."""

    def __init__(self, executor: Executor, order: StepOrder, before: Launched | None) -> None:
        self._executor = executor
        self._order = order
        self._before = before
        self._done: Future[StepResult] = Future()

    def run(self) -> None:
        try:
            self._done.set_result(self._carried_out())
        except BaseException as error:
            self._done.set_exception(error)

    def wait(self) -> StepResult:
        return self._done.result()

    def _carried_out(self) -> StepResult:
        order, before, self._before = self._order, self._before, None
        entries = order.entries if before is None else _followed(order.entries, before)
        logits = self._executor.execute(entries, order.copies)
        return StepResult(logits, None if order.draws is None else order.draws.draw(logits))


def _followed(entries: Sequence[BatchEntry], before: Launched) -> list[BatchEntry]:
    """The entries with what the step before drew."""
    try:
        drawn = before.wait().drawn
    except Exception as error:
        raise StepAbandoned("the step before has failed") from error
    tokens = [] if drawn is None else drawn.token_ids
    return [each if each.follows is None else _completed(each, tokens[each.follows]) for each in entries]


def _completed(entry: BatchEntry, token_id: int) -> BatchEntry:
    # Where no token was possible, the answer has ended, and nobody looks at what follows.
    return replace(entry, token_ids=[*entry.token_ids[:-1], max(0, token_id)], follows=None)
