"""What the books ask of an eviction policy: an order among the cached blocks that may be given up.

The books keep the tree: a cached block is on offer only while no findable block continues it, so a policy never has to
know who is whose parent. The policy keeps the order, and may learn from everything that it is told.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class EvictionPolicy(ABC):
    """The order in which cached blocks are given up. No verb but offered() may scan the blocks."""

    __slots__ = ()

    # What happens to blocks, whether on offer or not.

    @abstractmethod
    def store(self, block: int, name: bytes, depth: int) -> None:
        """New content: `block` was computed, and is found under `name`, a hash of its chain, at index `depth` of it."""

    @abstractmethod
    def hit(self, blocks: list[int]) -> None:
        """A prompt found `blocks`, the first of the chain first. They are held, and none is on offer any more."""

    @abstractmethod
    def release(self, blocks: list[int]) -> None:
        """The last holder of `blocks` let go, the last of the chain first. They are cached now."""

    @abstractmethod
    def evicted(self, block: int, name: bytes) -> None:
        """The content of `block`, which is not on offer any more, was given up to make room."""

    @abstractmethod
    def forget(self, block: int) -> None:
        """The content of `block`, which is not on offer any more, was dropped for another reason."""

    @abstractmethod
    def released_at(self, block: int) -> int:
        """When a cached block was released, on a clock that never goes back."""

    # The order.

    @abstractmethod
    def add(self, block: int) -> None:
        """Puts `block`, which is cached, on offer."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """Takes `block` off the offer if it is on it."""

    @abstractmethod
    def victim(self) -> int:
        """Takes the block to give up next off the offer and returns it; 0 when nothing is on offer."""

    @abstractmethod
    def comes_first(self, block: int) -> bool:
        """Whether `block`, which is cached, would be the next victim if it were on offer. False when in doubt."""

    @abstractmethod
    def offered(self) -> list[int]:
        """The blocks on offer, in no order; for check() and for operators."""
