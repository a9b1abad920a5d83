"""Least recently released first: the order that every other policy is compared with."""

from __future__ import annotations

from kvmanager.policy import EvictionPolicy
from kvmanager.residency import Residency
from kvmanager.runs import Run, Runs
from kvmanager.victims import Victims


class LruEviction(EvictionPolicy):
    """A heap of stamps, one stamp for each release.

    All blocks of a release share a stamp: the books offer the end of a chain before its beginning. A run is cut where
    it is hit or released in part, so that its blocks were released together.
    """

    __slots__ = ("_now", "_offer", "_runs")

    def __init__(self, num_blocks: int, residency: Residency | None = None) -> None:
        super().__init__(residency or Residency(num_blocks))
        self._runs = Runs(num_blocks)
        self._offer = Victims()
        self._now = 0

    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        run = Run(blocks[:], depth)
        self._runs.add(run)
        self.residency.stored(run, names)

    def hit(self, blocks: list[int]) -> None:
        for run in self._runs.cover(blocks):
            if run.cached:
                run.cached = False
                self.residency.woken(run)

    def release(self, blocks: list[int]) -> None:
        self._now += 1
        runs = self._runs.cover(blocks[::-1])
        for run in runs:
            run.stamp, run.cached = self._now, True
        self.residency.idled(runs)
        self._runs.join(runs)

    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        self._offer.retract(blocks[0])
        run = self._runs.of(blocks[0])
        self.residency.evicted(run, names)
        self._runs.shorten(run, len(blocks))

    def forget(self, block: int) -> None:
        self._runs.drop(block)

    def released_at(self, block: int) -> int:
        return self._runs.of(block).stamp

    def add(self, block: int) -> None:
        self._offer.offer(block, 0, self._runs.of(block).stamp)

    def remove(self, block: int) -> None:
        self._offer.retract(block)

    def victims(self, most: int) -> list[int]:
        block = self._offer.first()
        return self._runs.of(block).blocks[: -most - 1 : -1] if block else []

    def offered(self) -> list[int]:
        return self._offer.members()
