"""What the books ask of an eviction policy: an order among the cached blocks that nothing cached continues.

The books keep the tree: a cached block is offered to the policy only while no findable block continues it, so a policy
never has to know who is whose parent. The policy keeps the order, and may learn from everything it is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class EvictionPolicy(ABC):
    """The order in which cached blocks are given up. No verb may scan the blocks."""

    __slots__ = ()

    @abstractmethod
    def store(self, block: int, name: bytes, depth: int) -> None:
        """New content: `block` was computed, and is found under `name`, a hash of its chain, at index `depth` of it."""

    @abstractmethod
    def hit(self, blocks: list[int]) -> None:
        """A prompt found `blocks`, the first of the chain first. They are held again, so none is on offer any more."""

    @abstractmethod
    def release(self, blocks: list[int]) -> None:
        """The last holder of `blocks` let go, the last of the chain first. They are cached now."""

    @abstractmethod
    def add(self, block: int) -> None:
        """`block` is on offer: it is cached and nothing findable continues it. Told after its release."""

    @abstractmethod
    def victim(self) -> int:
        """Takes the block to give up next off the offer and returns it. There must be one."""

    @abstractmethod
    def evicted(self, block: int, name: bytes) -> None:
        """The content of `block` was given up to make room."""

    @abstractmethod
    def forget(self, block: int) -> None:
        """The content of `block` was dropped for another reason; if `block` was on offer, it is not any more."""
