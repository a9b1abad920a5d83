"""The lease of a runner: spare blocks that are its own already, and in no block table yet."""

from __future__ import annotations

from collections.abc import Iterable


class Lease:
    """A block table without a sequence: each of its blocks is held once. The oldest comes first."""

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def members(self) -> list[int]:
        """The blocks."""
        return list(self._blocks)

    def add(self, blocks: Iterable[int]) -> None:
        """Takes in blocks that are held once and in no block table."""
        self._blocks.update(dict.fromkeys(blocks))

    def remove(self, blocks: Iterable[int]) -> None:
        """Lets go of blocks that are in it; whose they are now is the caller's business."""
        for block in blocks:
            del self._blocks[block]

    def strangers(self, blocks: Iterable[int]) -> list[int]:
        """Those of `blocks` that are not in the lease, or come a second time."""
        seen: set[int] = set()
        strange: list[int] = []
        for block in blocks:
            if block not in self._blocks or block in seen:
                strange.append(block)
            seen.add(block)
        return strange
