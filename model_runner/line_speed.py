"""How fast the line of requests moves, for those who are told to come back later."""

from __future__ import annotations

from collections import deque

REMEMBERED = 32
"""Admissions that are looked back on."""
UNKNOWN_SECONDS = 1.0
"""The answer before two requests were admitted."""
LEAST_SECONDS = 0.1
MOST_SECONDS = 60.0


class LineSpeed:
    """Times are seconds on the engine's clock."""

    def __init__(self) -> None:
        self._admissions: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, now: float) -> None:
        """A request was admitted for the first time."""
        self._admissions.append(now)

    def seconds_per_request(self, now: float) -> float:
        """Until the next admission: the mean time between those of late, or as long as none has come, if longer."""
        if len(self._admissions) < 2:
            return UNKNOWN_SECONDS
        first, last = self._admissions[0], self._admissions[-1]
        mean = (last - first) / (len(self._admissions) - 1)
        return min(MOST_SECONDS, max(LEAST_SECONDS, mean, now - last))
