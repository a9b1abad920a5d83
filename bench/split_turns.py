"""Two engines in one process run by turns, some steps each, so that whatever else the machine does costs both alike."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

PATIENCE_SECONDS = 600


@dataclass(slots=True)
class Meter:
    """What the turns of one engine took, in seconds: by the clock, of its own thread, and of the whole process.

    cycles: of each step, from its beginning to that of the next one, by the clock. books: what the books' verbs took in
    it. waits: of each step that waited for an answer, how long.
    """

    steps: int = 0
    wall: float = 0.0
    thread: float = 0.0
    process: float = 0.0
    cycles: list[float] = field(default_factory=list)
    books: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def __add__(self, other: Meter) -> Meter:
        return Meter(
            self.steps + other.steps,
            self.wall + other.wall,
            self.thread + other.thread,
            self.process + other.process,
            self.cycles + other.cycles,
            self.books + other.books,
            self.waits + other.waits,
        )


class Turns:
    """Who may run: each side of `order` in turn, for `steps` steps. Nobody begins before all sides have come.

    What begins with a call of step() ends with the next one: a whole cycle of an engine's loop.
    """

    def __init__(self, order: str, steps: int) -> None:
        self.meters = {side: Meter() for side in order}
        self._order = order
        self._steps = steps
        self._index = 0
        self._left = 0
        self._come: set[str] = set()
        self._changed = threading.Condition()
        self._started = (0.0, 0.0, 0.0)
        self._stepped = 0.0

    def is_on(self, side: str) -> bool:
        """Whether it is this side's turn, and has begun."""
        return self._current() == side and self._left > 0

    def step(self, side: str) -> None:
        """Called by a side's thread at the beginning of each of its steps; returns when the step may run."""
        if self.is_on(side):
            self._left -= 1
            began, self._stepped = self._stepped, time.perf_counter()
            self.meters[side].cycles.append(self._stepped - began)
            if self._left:
                return
            self._end(side)
        with self._changed:
            self._come.add(side)
            self._changed.notify_all()
            may_go = self._changed.wait_for(lambda: self._may_go(side), PATIENCE_SECONDS)
            assert may_go, f"side {side} waited for its turn for too long"
            if self._current() == side:
                self._left = self._steps
                self._started = _now()
                self._stepped = self._started[0]

    def wait(self) -> None:
        """Returns when all turns are over."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._current() is None, PATIENCE_SECONDS), "the turns did not end"

    def _current(self) -> str | None:
        return self._order[self._index] if self._index < len(self._order) else None

    def _may_go(self, side: str) -> bool:
        current = self._current()
        return current is None or (current == side and self._come == set(self._order))

    def _end(self, side: str) -> None:
        wall, thread, process = (now - then for now, then in zip(_now(), self._started, strict=True))
        self.meters[side] += Meter(self._steps, wall, thread, process)
        with self._changed:
            self._index += 1
            self._changed.notify_all()


def _now() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()
