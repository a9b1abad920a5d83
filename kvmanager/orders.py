"""The orders among runs on offer: by their release, as LRU's, and by what they are worth.

A run is on offer with its last block: nothing findable continues that. Time is counted in stored blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from typing import Final

from kvmanager.return_model import AGES, CLASSES, ReturnModel, age_bucket
from kvmanager.runs import NO_GROUP, Run, Runs
from kvmanager.victims import Victims

_LISTED: Final = 0
_BETWEEN: Final = 1


class Order(ABC):
    """Runs that may be given up. A run that is on offer has a group; only an order sets it."""

    __slots__ = ()

    @abstractmethod
    def add(self, run: Run, now: int) -> None:
        """Puts a run on offer that is not."""

    @abstractmethod
    def remove(self, run: Run) -> None:
        """Takes a run off the offer that is on it."""

    @abstractmethod
    def first(self, most: int, now: int) -> list[int]:
        """The block to give up next, and those before it in its run that come next: at least 1, at most `most`; or
        none."""

    @abstractmethod
    def last_blocks(self) -> list[int]:
        """Of each run on offer, in no order."""


class ReleaseOrder(Order):
    """What was released first goes first: LRU's order, exactly.

    Runs go on offer as they are released, or as the one behind them was given up, the oldest of all: at an end of a
    linked list. Those that belong in between are in a heap beside it, O(log of their number).
    """

    __slots__ = ("_between", "_head", "_runs", "_tail")

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._head: Run | None = None
        self._tail: Run | None = None
        self._between = Victims()

    def add(self, run: Run, now: int) -> None:
        head, tail = self._head, self._tail
        run.group = _LISTED
        run.before = run.after = None
        if head is None or tail is None:
            self._head = self._tail = run
        elif run.release >= tail.release:
            self._tail = tail.after = run
            run.before = tail
        elif run.release <= head.release:
            self._head = head.before = run
            run.after = head
        else:
            run.group = _BETWEEN
            self._between.offer(run.blocks[-1], 0, run.release)

    def remove(self, run: Run) -> None:
        before, after, group = run.before, run.after, run.group
        run.group = NO_GROUP
        run.before = run.after = None
        if group == _BETWEEN:
            self._between.retract(run.blocks[-1])
            return
        if before is None:
            self._head = after
        else:
            before.after = after
        if after is None:
            self._tail = before
        else:
            after.before = before

    def first(self, most: int, now: int) -> list[int]:
        run = self._head
        between = self._between.first()
        if between and (run is None or self._runs.of(between).release < run.release):
            run = self._runs.of(between)
        return run.blocks[: -most - 1 : -1] if run is not None else []

    def last_blocks(self) -> list[int]:
        return self._between.members() + _last_blocks(self._head)


class WorthOrder(Order):
    """What is worth least by `model` at its age goes first; of what is worth the same, the oldest.

    Runs of one class that were released in the same stretch of `width` stored blocks form a group: a linked list,
    whose number is stretch * CLASSES + class. Groups are ranked again as a stretch is over. Each verb is O(log groups).
    """

    __slots__ = ("_groups", "_heads", "_model", "_stretch", "_tails", "_unit", "_width")

    def __init__(self, model: ReturnModel, unit: int, width: int) -> None:
        self._model = model
        self._unit = unit
        self._width = width
        self._heads: dict[int, Run] = {}
        self._tails: dict[int, Run] = {}
        self._groups: list[tuple[float, int]] = []
        """A heap of (worth, group); empty groups are skipped when they surface."""
        self._stretch = 0

    def add(self, run: Run, now: int) -> None:
        group = run.group = run.stamp // self._width * CLASSES + run.kind
        run.before = run.after = None
        head = self._heads.get(group)
        if head is None:
            self._heads[group] = self._tails[group] = run
            heappush(self._groups, (self._worth_of(group, now), group))
        elif run.stamp == now:
            tail = self._tails[group]
            self._tails[group] = tail.after = run
            run.before = tail
        else:
            # Its last continuation has just been given up: it is as old as that.
            self._heads[group] = head.before = run
            run.after = head

    def remove(self, run: Run) -> None:
        before, after, group = run.before, run.after, run.group
        run.group = NO_GROUP
        run.before = run.after = None
        if before is not None:
            before.after = after
        elif after is not None:
            self._heads[group] = after
        else:
            del self._heads[group], self._tails[group]
            return
        if after is not None:
            after.before = before
        elif before is not None:
            self._tails[group] = before

    def first(self, most: int, now: int) -> list[int]:
        if now // self._width != self._stretch:
            self.rank(now)
        groups, heads = self._groups, self._heads
        if not heads:
            return []
        while groups[0][1] not in heads:
            heappop(groups)
        run = heads[groups[0][1]]
        if run.stamp == now and run.after is not None:
            # The block before it would enter behind the others of this moment.
            most = 1
        return run.blocks[: -most - 1 : -1]

    def last_blocks(self) -> list[int]:
        return [block for head in self._heads.values() for block in _last_blocks(head)]

    def rank(self, now: int) -> None:
        """Groups are worth something else now."""
        self._stretch = now // self._width
        self._groups = [(self._worth_of(group, now), group) for group in self._heads]
        heapify(self._groups)

    def _worth_of(self, group: int, now: int) -> float:
        age = now - group // CLASSES * self._width
        return self._model.worth[group % CLASSES * AGES + age_bucket(age // self._unit)]


def _last_blocks(head: Run | None) -> list[int]:
    """Of each run of a linked list."""
    found: list[int] = []
    while head is not None:
        found.append(head.blocks[-1])
        head = head.after
    return found
