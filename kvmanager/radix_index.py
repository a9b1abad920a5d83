"""The radix index: the tree of branches walked by what the blocks hold, which also finds a match inside a block.

A lookup computes no hash: what it finds has names already. Of each branch it keeps the contents; and of each block from
which branches grow those, sorted by what their first blocks hold, so that the one with the longest common beginning is
a neighbour of where the prompt would stand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set

from kvmanager.block_contents import TOKEN_BYTES, BlockContents
from kvmanager.hashing import HashChain
from kvmanager.prefix_index import NO_BLOCK, NO_NAME, NOTHING, Branch, PrefixIndex


class _Parting:
    """The branches that grow from one block, sorted by `heads`, the contents of their first blocks."""

    __slots__ = ("branches", "heads")

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.branches: list[Branch] = []

    def find(self, content: bytes) -> Branch | None:
        """The branch that begins with that content."""
        place = bisect_left(self.heads, content)
        if place < len(self.heads) and self.heads[place] == content:
            return self.branches[place]
        return None

    def add(self, content: bytes, branch: Branch) -> None:
        """Adds a branch of new content."""
        place = bisect_left(self.heads, content)
        self.heads.insert(place, content)
        self.branches.insert(place, branch)

    def remove(self, content: bytes) -> None:
        """Takes the branch that begins with that content out."""
        place = bisect_left(self.heads, content)
        del self.heads[place]
        del self.branches[place]

    def nearest(self, place: int, step: int, hidden: Set[int]) -> tuple[bytes, int]:
        """The content and the block of the first from `place` on, in steps of 1 or -1, that is not hidden."""
        while 0 <= place < len(self.heads):
            block = self.branches[place].blocks[0]
            if block not in hidden:
                return self.heads[place], block
            place += step
        return b"", NO_BLOCK


_NONE = _Parting()
"""That of a block from which no branch grows; nothing is ever added to it."""


class RadixIndex(PrefixIndex):
    """Finds the longest cached prefix to the token. Its whole blocks are exactly those that a HashIndex finds."""

    __slots__ = ("_contents", "_partings")

    def __init__(self, num_blocks: int, names_may_collide: bool = False) -> None:
        super().__init__(num_blocks, names_may_collide)
        self._contents: dict[Branch, BlockContents] = {}
        self._partings: dict[int, _Parting] = {}
        """By the block that the branches grow from, NO_BLOCK for those that begin a prompt; none is empty."""

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The run of blocks whose contents follow each other from the beginning."""
        blocks: list[int] = []
        before = NO_BLOCK
        while len(blocks) < max_blocks:
            parting = self._partings.get(before)
            branch = None if parting is None else parting.find(chain.content(len(blocks)))
            if branch is None:
                break
            equal = self._contents[branch].num_equal(chain, len(blocks), max_blocks - len(blocks))
            blocks += branch.blocks[:equal]
            before = blocks[-1]
        chain.adopt([self.names[block] for block in blocks])
        return blocks

    def match_inside(
        self, chain: HashChain, blocks: list[int], max_tokens: int, hidden: Set[int] = NOTHING
    ) -> tuple[int, int]:
        """The block behind the last of `blocks` that shares the most of the next tokens."""
        before, index = (blocks[-1] if blocks else NO_BLOCK), len(blocks)
        keys = chain.keys(index)
        wanted = chain.content(index)[: len(keys) + max_tokens * TOKEN_BYTES]
        parting = self._partings.get(before, _NONE)
        place = bisect_left(parting.heads, wanted)
        neighbours = [parting.nearest(place - 1, -1, hidden), parting.nearest(place, 1, hidden)]
        neighbours.append(self._next_in_branch(before, hidden))
        best, most = NO_BLOCK, 0
        for content, block in neighbours:
            common = _common_bytes(content, wanted) - len(keys)
            if common // TOKEN_BYTES > most:
                best, most = block, common // TOKEN_BYTES
        return best, most

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        """As of any index. What the blocks hold is kept."""
        super().publish(blocks, chain, first, last)
        branch = self._branches[blocks[first]]
        contents = self._contents.get(branch)
        if contents is None:
            # Most blocks have the keys of the last one: the salt is in the first of a chain alone.
            contents = self._contents[branch] = BlockContents(chain.block_size, chain.keys(last - 1))
            self._partings.setdefault(branch.before(), _Parting()).add(chain.content(first), branch)
        contents.extend(chain, first, last)

    def holds(self, block: int, chain: HashChain, block_index: int) -> bool:
        """Whether an owner holds what the chain has at `block_index`; names may collide."""
        parent = chain.names[block_index - 1] if block_index else NO_NAME
        if self.names[self.parent(block)] != parent:
            return False
        content = self._contents[self._branches[block]].content(self._place_of(block))
        return content == chain.content(block_index)

    def contradictions(self) -> list[str]:
        """Contents that are not those of their branches, and branches that don't stand where they grow."""
        wrong: list[str] = []
        branches = self.branches()
        for branch in branches:
            contents, parting = self._contents.get(branch), self._partings.get(branch.before(), _NONE)
            if contents is None or len(contents) != len(branch.blocks):
                kept = 0 if contents is None else len(contents)
                wrong.append(f"contents of {kept} blocks are kept of block {branch.blocks[0]} and those behind it")
            elif parting.find(contents.content(0)) is not branch:
                wrong.append(f"block {branch.blocks[0]} is not found by what it holds behind {branch.before()}")
        grown = sum([len(parting.branches) for parting in self._partings.values()])
        if not len(branches) == len(self._contents) == grown:
            wrong.append(f"{len(branches)} branches have {len(self._contents)} contents, and {grown} can be walked to")
        return wrong

    def clear(self) -> None:
        """Forgets every name."""
        super().clear()
        self._contents.clear()
        self._partings.clear()

    def _leaving(self, branch: Branch, count: int) -> None:
        contents = self._contents[branch]
        if count < len(contents):
            contents.shorten(count)
            return
        before = branch.before()
        parting = self._partings[before]
        parting.remove(contents.content(0))
        if not parting.heads:
            del self._partings[before]
        del self._contents[branch]

    def _hand_over(self, owner: int, heir: int) -> None:
        super()._hand_over(owner, heir)
        parting = self._partings.pop(owner, None)
        if parting is not None:
            self._partings[heir] = parting

    def _next_in_branch(self, block: int, hidden: Set[int]) -> tuple[bytes, int]:
        """The content and the block that is behind an owner in its own branch; b"" and NO_BLOCK for none."""
        if block == NO_BLOCK:
            return b"", NO_BLOCK
        branch = self._branches[block]
        place = self._place_of(block) + 1
        if place == len(branch.blocks) or branch.blocks[place] in hidden:
            return b"", NO_BLOCK
        return self._contents[branch].content(place), branch.blocks[place]


def _common_bytes(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    for index in range(length):
        if one[index] != other[index]:
            return index
    return length
