"""Whether answers come within a step: only then is asking for room one step before its need soon enough."""

from __future__ import annotations

from collections import deque

STEPS = 16
ANSWERS = 64
"""The latest ones that count."""


class Punctuality:
    """The slowest of the latest answers beside the shortest of the latest steps. All in seconds."""

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=ANSWERS)
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._stepped_at: float | None = None

    def note_answer(self, seconds: float) -> None:
        """A message was answered after so long."""
        self._answers.append(seconds)

    def note_step(self, now: float) -> None:
        """A step is scheduled."""
        if self._stepped_at is not None:
            self._steps.append(now - self._stepped_at)
        self._stepped_at = now

    @property
    def is_good(self) -> bool:
        """Whether each of the latest answers would have come within the shortest of the latest steps.

        False until there are as many steps and an answer.
        """
        return len(self._steps) == STEPS and bool(self._answers) and max(self._answers) < min(self._steps)
