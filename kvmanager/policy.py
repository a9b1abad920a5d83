"""What the books ask of an eviction policy: an order among the cached blocks that may be given up.

The books keep the tree: a cached block is on offer only while no findable block continues it, so a policy never has to
know who is whose parent. The policy keeps the order, and may learn from everything that it is told. It is told of
whole parts of a chain at once, so that it need not do for each block what is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvmanager.residency import Residency


class EvictionPolicy(ABC):
    """The order in which cached blocks are given up. No verb but offered() may scan the blocks.

    A list of blocks is always of one chain, in its order or against it. `residency` is told how long contents live.
    """

    __slots__ = ("residency",)

    def __init__(self, residency: Residency) -> None:
        self.residency = residency

    # What happens to blocks, whether on offer or not.

    @abstractmethod
    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        """New content: `blocks` were computed, the first at index `depth` of the chain, and are found under `names`."""

    @abstractmethod
    def hit(self, blocks: list[int]) -> None:
        """A prompt found `blocks`, the first of the chain first. They are held, and none is on offer any more."""

    @abstractmethod
    def release(self, blocks: list[int]) -> None:
        """The last holder of `blocks` let go, the last of the chain first. They are cached now."""

    @abstractmethod
    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        """The content of `blocks`, the last of the chain first, was given up to make room: the first of what victims()
        said last, or one that was not on offer. They are not on offer any more."""

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
    def victims(self, most: int) -> list[int]:
        """The block to give up next, then those before it in its chain that would be next in turn if nothing else
        continues them: at least 1 and at most `most`; none when nothing is on offer. Changes no order."""

    @abstractmethod
    def offered(self) -> list[int]:
        """The blocks on offer, in no order; for check() and for operators."""
