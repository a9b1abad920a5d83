"""Compares the hits of a policy with those of LRU, to keep to LRU's order until, and unless, the policy has more.

Both sides are read off the blocks that are remembered, cached or not. LRU has those that wait for less than some time,
as many as there is room for; the policy has those that are worth most at their age, and have been at every age before.
The uses since the last look say how many hits each would have had: so LRU needs no second cache, and the policy need
not be tried. While it decides, hits that it did not have are not counted: what is foreseen wrong ends when it costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvmanager.return_model import AGES

LEAD: Final = 0.01
"""The lead that the policy must have, as a part of LRU's hits."""
DEVIATIONS: Final = 0.7
"""And so many standard deviations: less than one, so that a first look can be enough where the lead is large."""
KEPT: Final = 0.95
"""How much a look counts at the next one."""


class Trial:
    """Looks at hits once per turnover of the pool or so. Uses are counted by the model's cell, class * AGES + age."""

    __slots__ = ("_hits", "_lead", "_lru_hits", "_returned", "_variance", "trusted")

    def __init__(self) -> None:
        self.trusted = False
        """Whether the policy decides."""
        self._returned: dict[int, int] = {}
        """Blocks that were used since the last look, by cell, and how many of them the cache had."""
        self._hits = 0
        self._lead = 0.0
        self._lru_hits = 0.0
        self._variance = 0.0

    def used(self, cell: int, count: int, hit: bool) -> None:
        """So many blocks that had waited are used again; `hit`: whether they were cached."""
        self._returned[cell] = self._returned.get(cell, 0) + count
        if hit:
            self._hits += count

    def judge(self, worth: Sequence[float], waiting: dict[int, int], room: int) -> None:
        """Decides who is to decide until the next look. worth, and how many blocks wait: by cell. room: in blocks."""
        cells = sorted(waiting.keys() | self._returned.keys())
        lru_hits = self._hits_of([(0.0, cell % AGES, cell) for cell in cells], waiting, room)
        hits = self._hits_of([(-_least_worth(worth, cell), cell % AGES, cell) for cell in cells], waiting, room)
        if self.trusted:
            hits = min(hits, float(self._hits))
        lead = hits - lru_hits
        self._lead = KEPT * self._lead + lead
        self._lru_hits = KEPT * self._lru_hits + lru_hits
        self._variance = KEPT * self._variance + lead * lead
        self.trusted = self._lead > LEAD * self._lru_hits + DEVIATIONS * self._variance**0.5
        self._returned = {}
        self._hits = 0

    def _hits_of(self, order: list[tuple[float, int, int]], waiting: dict[int, int], room: int) -> float:
        """Uses in the cells that fit into `room`, in this order; of cells alike but for their number, equal parts."""
        order.sort()
        hits, left = 0.0, float(room)
        start = 0
        while start < len(order) and left > 0.0:
            end = start
            blocks = uses = 0
            while end < len(order) and order[end][:2] == order[start][:2]:
                cell = order[end][2]
                blocks += waiting.get(cell, 0)
                uses += self._returned.get(cell, 0)
                end += 1
            hits += uses * min(1.0, left / blocks) if blocks else uses
            left -= blocks
            start = end
        return hits


def _least_worth(worth: Sequence[float], cell: int) -> float:
    """The least worth up to an age: a block that was given up does not come back for getting older."""
    return min(worth[cell - cell % AGES : cell + 1])
