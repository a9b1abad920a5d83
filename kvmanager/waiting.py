"""Blocks that wait for their next use, counted by class and by the time of their last one."""

from __future__ import annotations

from kvmanager.return_model import AGES, CLASSES, age_bucket


class Waiting:
    """Times are whole numbers that never go back: units of ReturnModel's ages. Each verb is O(1) but by_cell()."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        """By time * CLASSES + class; none is 0."""

    def add(self, kind: int, time: int, count: int) -> None:
        """So many blocks of class `kind` begin to wait at `time`, which is now."""
        key = time * CLASSES + kind
        self._counts[key] = self._counts.get(key, 0) + count

    def remove(self, kind: int, time: int, count: int) -> None:
        """So many of those that began to wait at `time` wait no more."""
        key = time * CLASSES + kind
        left = self._counts.get(key, 0) - count
        if left > 0:
            self._counts[key] = left
        else:
            self._counts.pop(key, None)

    def by_cell(self, now: int) -> dict[int, int]:
        """How many wait, by the model's cell: class * AGES + age."""
        cells: dict[int, int] = {}
        for key, count in self._counts.items():
            cell = key % CLASSES * AGES + age_bucket(now - key // CLASSES)
            cells[cell] = cells.get(cell, 0) + count
        return cells
