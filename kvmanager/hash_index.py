"""The hash index: finds the blocks that begin a prompt by their names, and reads none of what they hold."""

from __future__ import annotations

from bisect import bisect_left

from kvmanager.hashing import HashChain
from kvmanager.prefix_index import NO_BLOCK, NO_NAME, PrefixIndex


class HashIndex(PrefixIndex):
    """Finds blocks by the names of the chain."""

    __slots__ = ()

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The run of blocks found under the chain's names."""
        # Every full block of a prompt is published in the end, so that no name is computed in vain; nor is the last,
        # which alone would take as long as a dozen.
        chain.compute(chain.full_blocks)
        names = chain.names
        found: list[int] = []
        while len(found) < max_blocks:
            branch = self._heads.get(names[len(found)])
            if branch is None:
                break
            found += branch.blocks[: self._num_equal(branch.blocks, names, len(found), max_blocks)]
        return found

    def _num_equal(self, blocks: list[int], names: list[bytes], start: int, end: int) -> int:
        """How many of a branch's blocks have the names from `start` on; the first has."""
        most, own_names = min(len(blocks), end - start), self.names
        if own_names[blocks[most - 1]] == names[start + most - 1]:
            return most
        return bisect_left(range(most), True, key=lambda place: own_names[blocks[place]] != names[start + place])


class CheckedHashIndex(HashIndex):
    """A HashIndex for names that may collide: it keeps the content of every published block and compares on a hit."""

    __slots__ = ("_contents",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, names_may_collide=True)
        self._contents: list[bytes] = [NO_NAME] * num_blocks

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The run of blocks found under the chain's names, each of the same content behind the same parent."""
        chain.compute(max_blocks)
        blocks: list[int] = []
        for index in range(max_blocks):
            block = self.find(chain.names[index], index, NO_BLOCK)
            if not block or not self.holds(block, chain, index):
                break
            blocks.append(block)
        return blocks

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        """As of any index. The contents are kept."""
        super().publish(blocks, chain, first, last)
        for index in range(first, last):
            self._contents[blocks[index]] = chain.content(index)

    def add_spare(self, block: int, owner: int) -> None:
        """As of any index. The content is kept."""
        super().add_spare(block, owner)
        self._contents[block] = self._contents[owner]

    def replace(self, owner: int, block: int) -> None:
        """As of any index. The content is kept."""
        self._contents[block] = self._contents[owner]
        super().replace(owner, block)

    def holds(self, block: int, chain: HashChain, block_index: int) -> bool:
        """Whether an owner holds what the chain has at `block_index`, behind the same parent."""
        parent = chain.names[block_index - 1] if block_index else NO_NAME
        return self.names[self.parent(block)] == parent and self._contents[block] == chain.content(block_index)

    def withdraw_leaves(self, blocks: list[int]) -> int:
        """As of any index. The contents are forgotten."""
        for block in blocks:
            self._contents[block] = NO_NAME
        return super().withdraw_leaves(blocks)

    def _erase(self, block: int) -> None:
        super()._erase(block)
        self._contents[block] = NO_NAME


class NoIndex(PrefixIndex):
    """Finds nothing, and publishes nothing: a pool without a prefix cache."""

    __slots__ = ()

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """Nothing."""
        return []
