"""Compares the hits of a policy with those of LRU, to keep to LRU's order until, and unless, the policy has more.

Both sides are read off the blocks that are remembered, cached or not. LRU has those that wait for less than some time,
as many as there is room for; the policy has those that are worth most at their age, and have been at every age before.
The uses since the last look say how many hits each would have had: so LRU needs no second cache, and the policy need
not be tried. Worths are judged by uses that they do not know. While the policy decides, hits that it did not have are
not counted: what is foreseen wrong ends when it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvmanager.return_model import AGES

LEAD: Final = 0.01
"""The lead that the policy must have, as a part of LRU's hits."""
DEVIATIONS: Final = 0.7
"""And so many standard deviations: less than one, so that a first look can be enough where the lead is large."""
SURE: Final = 2.5
"""The same for worths that know the uses that they are judged by, where there are no others yet."""
KEPT: Final = 0.95
"""How much a look counts at the next one."""


class Trial:
    """Looks at hits once per turnover of the pool or so. Uses are counted by the model's cell, class * AGES + age."""

    __slots__ = ("_hits", "_lead", "_looks", "_lru_hits", "_returned", "_variance", "trusted")

    def __init__(self) -> None:
        self.trusted = False
        """Whether the policy decides."""
        self._returned: dict[int, int] = {}
        """Blocks that were used since the last look, by cell, and how many of them the cache had."""
        self._hits = 0
        self._looks = 0
        self._lead = 0.0
        self._lru_hits = 0.0
        self._variance = 0.0

    def used(self, cell: int, count: int, hit: bool) -> None:
        """So many blocks that had waited are used again; `hit`: whether they were cached."""
        self._returned[cell] = self._returned.get(cell, 0) + count
        if hit:
            self._hits += count

    def judge(self, worth: Sequence[float], waiting: dict[int, int], room: int) -> None:
        """Decides who is to decide until the next look. worth, and how many blocks wait: by cell. room: in blocks.

        The worths were learned before the uses that have been counted.
        """
        lru_hits, lead, _ = self._compare(worth, waiting, room)
        if self.trusted:
            lead = min(lead, self._hits - lru_hits)
        self._looks += 1
        self._lead = KEPT * self._lead + lead
        self._lru_hits = KEPT * self._lru_hits + lru_hits
        self._variance = KEPT * self._variance + lead * lead
        self.trusted = self._lead > LEAD * self._lru_hits + DEVIATIONS * self._variance**0.5

    def judge_early(self, worth: Sequence[float], waiting: dict[int, int], room: int, together: float) -> None:
        """The same by worths that were learned from these very uses, of which so many come together.

        It counts at the second look alone. Before, the pool has not been filled, and later there are better witnesses.
        """
        if self._looks != 2:
            return
        lru_hits, lead, changed = self._compare(worth, waiting, room)
        if lead > LEAD * lru_hits + SURE * (together * changed) ** 0.5:
            self.trusted = True

    def count_anew(self) -> None:
        """Uses from now on are for the next look."""
        self._returned = {}
        self._hits = 0

    def _compare(self, worth: Sequence[float], waiting: dict[int, int], room: int) -> tuple[float, float, float]:
        """LRU's hits, how many more the policy has, and the variance of that, were each use one of its own."""
        cells = sorted(waiting.keys() | self._returned.keys())
        by_age = _parts([(0.0, cell % AGES, cell) for cell in cells], waiting, room)
        by_worth = _parts([(*_least_worth(worth, cell), cell) for cell in cells], waiting, room)
        lru_hits = lead = changed = 0.0
        for cell, uses in sorted(self._returned.items()):
            lru = by_age.get(cell, 0.0)
            more = by_worth.get(cell, 0.0) - lru
            lru_hits += uses * lru
            lead += uses * more
            changed += uses * more * more
        return lru_hits, lead, changed


def _parts(order: list[tuple[float, int, int]], waiting: dict[int, int], room: int) -> dict[int, float]:
    """Which part of each cell fits into `room`, in this order; of cells alike but for their number, equal parts.

    Those of which nothing does are left out.
    """
    order.sort()
    parts: dict[int, float] = {}
    left = float(room)
    start = 0
    while start < len(order) and left > 0.0:
        end = start
        blocks = 0
        while end < len(order) and order[end][:2] == order[start][:2]:
            blocks += waiting.get(order[end][2], 0)
            end += 1
        part = min(1.0, left / blocks) if blocks else 1.0
        for _, _, cell in order[start:end]:
            parts[cell] = part
        left -= blocks
        start = end
    return parts


def _least_worth(worth: Sequence[float], cell: int) -> tuple[float, int]:
    """The least worth up to an age, negated, and when it was last that.

    A block that was given up does not come back for getting older; those that have passed one dip are alike.
    """
    first = cell - cell % AGES
    row = worth[first : cell + 1]
    least = min(row)
    age = len(row) - 1
    while row[age] != least:
        age -= 1
    return -least, age
