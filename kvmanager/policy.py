"""Which cached block is worth least: a ranking that learns from what is stored, hit, released and given up."""

from __future__ import annotations

from abc import ABC, abstractmethod


class EvictionPolicy(ABC):
    @abstractmethod
    def store(self, block: int, name: bytes, depth: int) -> None: ...
    @abstractmethod
    def hit(self, blocks: list[int]) -> None: ...
    @abstractmethod
    def release(self, blocks: list[int]) -> None: ...
    @abstractmethod
    def rank(self, block: int) -> int: ...
    @abstractmethod
    def evicted(self, block: int, name: bytes) -> None: ...
    @abstractmethod
    def forget(self, block: int) -> None: ...
