"""Splits the wall time of an engine step into phases that add up to it."""

from __future__ import annotations

from time import monotonic

from model_runner.observer import PhaseSeconds
from model_runner.timed_books import TimedBooks


class StepClock:
    """Laps of one thread. What the books took of a lap counts as `kv`, whatever the lap is called."""

    def __init__(self, books: TimedBooks) -> None:
        self._books = books
        self.start()

    def start(self) -> None:
        """Begins a step: nothing has taken any time."""
        self._phases = dict.fromkeys(PhaseSeconds.__slots__, 0.0)
        self._lap_began = monotonic()
        self._books_before = self._books.seconds

    def go_on(self) -> None:
        """Goes on with the step; the time since the last lap was nobody's."""
        self._lap_began = monotonic()
        self._books_before = self._books.seconds

    def lap(self, phase: str) -> None:
        """What went by since the last lap, less the books' part, was `phase`: a field of PhaseSeconds."""
        now, books = monotonic(), self._books.seconds
        kv = books - self._books_before
        self._phases["kv"] += kv
        self._phases[phase] += now - self._lap_began - kv
        self._lap_began, self._books_before = now, books

    def phases(self) -> PhaseSeconds:
        """The step so far, up to the last lap."""
        return PhaseSeconds(**self._phases)
