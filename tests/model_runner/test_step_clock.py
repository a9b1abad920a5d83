"""The phases of a step on a clock that a test moves: each has its own seconds, and they add up to the wall time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvmanager import KvManager
from model_runner import draws
from model_runner.books import Admission, AllocationRequest, BlockGrant, SequenceUpdate
from model_runner.engine_types import Failure
from model_runner.observer import PhaseSeconds
from model_runner.request import Chunk
from model_runner.sampling import sample
from model_runner.step_clock import StepClock
from model_runner.timed_books import TimedBooks
from services.books_inprocess import InProcessBooks
from tests.model_runner.engine_harness import Harness
from tests.model_runner.step_modes import StepMode, in_mode


class Clock:
    """Seconds that pass when somebody says so; powers of two, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("step_clock", "timed_books"):
        monkeypatch.setattr(f"model_runner.{module}.monotonic", clock)
    return clock


class SlowBooks(InProcessBooks):
    """Books whose verbs take 1/4 (allocate), 1/8 (append) and 1/16 second (free)."""

    def __init__(self, manager: KvManager, clock: Clock) -> None:
        super().__init__(manager)
        self.clock = clock

    def allocate(self, request: AllocationRequest) -> Admission | None:
        self.clock.advance(0.25)
        return super().allocate(request)

    def append(self, updates: Sequence[SequenceUpdate]) -> list[BlockGrant] | None:
        if updates:  # None: the engine asks whether the books are there, between steps.
            self.clock.advance(0.125)
        return super().append(updates)

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        self.clock.advance(0.0625)
        super().free(updates, preempted=preempted)


def test_laps_add_up_and_the_books_are_taken_out_of_them(clock: Clock) -> None:
    books = TimedBooks(SlowBooks(KvManager("boot"), clock))
    laps = StepClock(books)
    clock.advance(99)
    laps.start()
    clock.advance(1)
    books.close()
    laps.lap("schedule")
    clock.advance(2)
    books.seconds += 0.5
    laps.lap("forward")
    clock.advance(4)
    laps.lap("sample")
    clock.advance(8)
    laps.lap("sample")
    assert laps.phases() == PhaseSeconds(schedule=1.0, kv=0.5, forward=1.5, sample=12.0, deliver=0.0)
    assert laps.phases().total == 15.0
    laps.start()
    assert laps.phases().total == 0


class TimedHarness(Harness):
    """Handing chunks over takes 1/32 second, and each step's wall time is noted."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        manager = KvManager("boot")
        super().__init__(block_size=4, manager=manager, books=SlowBooks(manager, clock))
        execute = self.executor.execute

        def slow_execute(*arguments):
            clock.advance(2.0)
            return execute(*arguments)

        self.executor.execute = slow_execute

    def _take(self, items: Sequence[Chunk | Failure]) -> None:
        self.clock.advance(0.03125)
        super()._take(items)


def test_a_request_by_phases(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens after a prompt of 6 in blocks of 4: Allocate first, Append when a block is full, Free at the end."""

    def slow_sample(*arguments):
        clock.advance(0.5)
        return sample(*arguments)

    monkeypatch.setattr(draws, "sample", slow_sample)
    with in_mode(StepMode.SYNC):
        harness = TimedHarness(clock)
    harness.submit("a", [1, 2, 3, 4, 5, 6], 5)
    began = clock.now
    with harness:
        harness.wait("a")
    phases = [step.phases for step in harness.recorder.steps]
    assert [each.kv for each in phases] == [0.25, 0.125, 0, 0.125, 0.0625]
    for each in phases:
        assert (each.schedule, each.forward, each.sample, each.deliver) == (0, 2.0, 0.5, 0.03125)
    assert sum(each.total for each in phases) == clock.now - began
