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
        try:
            return _Done(_carried_out(self._executor, order, before))
        except BaseException as error:
            return _Failed(error)

    def close(self) -> None:
        pass


class WorkerSteps:
    """Steps run on one thread, so that the engine's can plan and deliver meanwhile."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, "octavo-steps")

    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        return _Running(self._thread.submit(_carried_out, self._executor, order, before))

    def close(self) -> None:
        self._thread.shutdown()


@dataclass(frozen=True, slots=True)
class _Done:
    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException

    def wait(self) -> StepResult:
        raise self.error


@dataclass(frozen=True, slots=True)
class _Running:
    future: Future[StepResult]

    def wait(self) -> StepResult:
        return self.future.result()


def _carried_out(executor: Executor, order: StepOrder, before: Launched | None) -> StepResult:
    """A step whose draws are on the host as soon as it is done."""
    entries = order.entries if before is None else _followed(order.entries, before)
    logits = executor.execute(entries, order.copies)
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
