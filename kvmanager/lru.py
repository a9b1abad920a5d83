"""Least recently released first: the order that every other policy is compared with."""

from __future__ import annotations

from kvmanager.orders import ReleaseOrder
from kvmanager.policy import EvictionPolicy
from kvmanager.residency import Residency
from kvmanager.runs import NO_GROUP, Run, Runs


class LruEviction(EvictionPolicy):
    """The order of releases, one number for each.

    All blocks of a release share it: the books offer the end of a chain before its beginning. A run is cut where
    it is hit or released in part, so that its blocks were released together.
    """

    __slots__ = ("_order", "_releases", "_runs")

    def __init__(self, num_blocks: int, residency: Residency | None = None) -> None:
        super().__init__(residency or Residency(num_blocks))
        self._runs = Runs(num_blocks)
        self._order = ReleaseOrder(self._runs)
        self._releases = 0

    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        run = Run(blocks[:], depth)
        self._runs.add(run)
        self.residency.stored(run, names)

    def hit(self, blocks: list[int]) -> None:
        for run in self._runs.cover(blocks):
            if run.group != NO_GROUP:
                self._order.remove(run)
            if run.cached:
                run.cached = False
                self.residency.woken(run)

    def release(self, blocks: list[int]) -> None:
        self._releases += 1
        runs = self._runs.cover(blocks[::-1])
        for run in runs:
            run.release, run.cached = self._releases, True
        self.residency.idled(runs)
        self._runs.join(runs)

    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        run = self._runs.of(blocks[0])
        if run.group != NO_GROUP:
            self._order.remove(run)
        self.residency.evicted(run, names)
        self._runs.shorten(run, len(blocks))

    def forget(self, block: int) -> None:
        self._runs.drop(block)

    def released_at(self, block: int) -> int:
        return self._runs.of(block).release

    def add(self, block: int) -> None:
        run = self._runs.ending(block)
        if run.group == NO_GROUP:
            self._order.add(run, self._releases)

    def remove(self, block: int) -> None:
        run = self._runs.of(block)
        if run.group != NO_GROUP and run.blocks[-1] == block:
            self._order.remove(run)

    def victims(self, most: int) -> list[int]:
        return self._order.first(most, self._releases)

    def offered(self) -> list[int]:
        return self._order.last_blocks()
