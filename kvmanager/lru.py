"""Least recently released first: the order that every other policy is compared with."""

from __future__ import annotations

from kvmanager.policy import EvictionPolicy
from kvmanager.victims import Victims


class LruEviction(EvictionPolicy):
    """A heap of stamps, one stamp for each release.

    All blocks of a release share a stamp: the books offer the end of a chain before its beginning.
    """

    __slots__ = ("_now", "_offer", "_stamps")

    def __init__(self, num_blocks: int) -> None:
        self._stamps: list[int] = [0] * num_blocks
        self._offer = Victims()
        self._now = 0

    def store(self, block: int, name: bytes, depth: int) -> None:
        pass

    def hit(self, blocks: list[int]) -> None:
        pass

    def release(self, blocks: list[int]) -> None:
        self._now += 1
        stamps, now = self._stamps, self._now
        for block in blocks:
            stamps[block] = now

    def evicted(self, block: int, name: bytes) -> None:
        pass

    def forget(self, block: int) -> None:
        pass

    def released_at(self, block: int) -> int:
        return self._stamps[block]

    def add(self, block: int) -> None:
        self._offer.offer(block, 0, self._stamps[block])

    def remove(self, block: int) -> None:
        self._offer.retract(block)

    def victim(self) -> int:
        return self._offer.pop()

    def comes_first(self, block: int) -> bool:
        return self._offer.comes_first(block, 0, self._stamps[block])

    def offered(self) -> list[int]:
        return self._offer.members()
