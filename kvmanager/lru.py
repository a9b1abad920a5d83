"""Least recently used."""

from __future__ import annotations

from kvmanager.policy import EvictionPolicy


class LruEviction(EvictionPolicy):
    def __init__(self, num_blocks: int) -> None:
        self._stamps: list[int] = [0] * num_blocks
        self._now = 0

    def store(self, block: int, name: bytes, depth: int) -> None: ...
    def hit(self, blocks: list[int]) -> None: ...
    def release(self, blocks: list[int]) -> None:
        self._now += 1
        stamp = self._now
        stamps = self._stamps
        for block in blocks:
            stamps[block] = stamp

    def rank(self, block: int) -> int:
        return self._stamps[block]

    def evicted(self, block: int, name: bytes) -> None: ...
    def forget(self, block: int) -> None: ...
