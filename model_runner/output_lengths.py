"""How many tokens an answer will still have, learnt from those that have ended.

An answer that was cut off, by its limit or its client, says only that it would have been longer. So the share of
answers that go on beyond each length is Kaplan and Meier's estimate, and what is left of an answer is the area below.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import groupby

WINDOW = 256
"""Answers that count: the latest ones."""


class OutputLengths:
    """The lengths, in tokens, of the answers that ended last."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, bool]] = deque(maxlen=WINDOW)
        self._lengths: list[int] = [0]
        """Lengths in order; from each on the share that goes on further, and the area under the shares before it."""
        self._shares: list[float] = [1.0]
        self._areas: list[float] = [0.0]
        self._stale = False

    def note(self, length: int, *, ended: bool) -> None:
        """An answer is over after `length` tokens: it ended by itself, or was cut off."""
        self._latest.append((length, ended))
        self._stale = True

    def remaining(self, done: int, limit: int | None) -> int:
        """Tokens to expect after the first `done` of an answer of at most `limit`, None for an unknown limit.

        Nothing is known of an answer that is longer than all that ended: it is taken to go on to its limit while no
        answer has ended by itself, and else for as long again as it is. Without a limit nothing is expected of it.
        """
        if self._stale:
            self._estimate()
        most = self._lengths[-1] if limit is None else limit
        if most <= done:
            return 0
        share = self._share(done)
        if not share:
            return min(most - done, done)
        return round((self._area(most) - self._area(done)) / share)

    def _share(self, length: int) -> float:
        return self._shares[bisect_right(self._lengths, length) - 1]

    def _area(self, length: int) -> float:
        place = bisect_right(self._lengths, length) - 1
        return self._areas[place] + self._shares[place] * (length - self._lengths[place])

    def _estimate(self) -> None:
        lengths, shares, areas = [0], [1.0], [0.0]
        left = len(self._latest)
        for length, answers in groupby(sorted(self._latest), key=lambda answer: answer[0]):
            ends = [ended for _, ended in answers]
            areas.append(areas[-1] + shares[-1] * (length - lengths[-1]))
            shares.append(shares[-1] * (1 - sum(ends) / left))
            lengths.append(length)
            left -= len(ends)
        self._lengths, self._shares, self._areas = lengths, shares, areas
        self._stale = False
