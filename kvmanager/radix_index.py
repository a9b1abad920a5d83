"""The radix index: a tree of blocks walked by their tokens, which also finds a match that ends inside a block.

Each node is one published name; its children are sorted by their content, so that the child with the longest common
beginning is a neighbour of where the prompt would stand. A lookup computes no hash: what it finds has names already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set
from typing import Final

from kvmanager.hashing import HashChain
from kvmanager.prefix_index import NO_BLOCK, NO_NAME, NOTHING, PrefixIndex

TOKEN_BYTES: Final = 4


class _Node:
    """One name: the block that is found under it, what that holds, and the nodes that follow, sorted by `keys`."""

    __slots__ = ("block", "content", "keys", "nodes", "parent")

    def __init__(self, block: int, content: bytes, parent: _Node | None) -> None:
        self.block = block
        self.content = content
        self.parent = parent
        self.keys: list[bytes] = []
        self.nodes: list[_Node] = []

    def find(self, content: bytes) -> _Node | None:
        """The child of that content."""
        index = bisect_left(self.keys, content)
        if index < len(self.keys) and self.keys[index] == content:
            return self.nodes[index]
        return None

    def add(self, node: _Node) -> None:
        """Adds a child of new content."""
        index = bisect_left(self.keys, node.content)
        self.keys.insert(index, node.content)
        self.nodes.insert(index, node)

    def nearest(self, index: int, step: int, hidden: Set[int]) -> _Node | None:
        """The first child from `index` on, in steps of 1 or -1, whose block is not hidden."""
        while 0 <= index < len(self.nodes):
            if self.nodes[index].block not in hidden:
                return self.nodes[index]
            index += step
        return None

    def remove(self, content: bytes) -> None:
        """Takes the child of that content out."""
        index = bisect_left(self.keys, content)
        del self.keys[index]
        del self.nodes[index]


class RadixIndex(PrefixIndex):
    """Finds the longest cached prefix to the token. Its whole blocks are exactly those that a HashIndex finds."""

    __slots__ = ("_nodes", "_root")

    def __init__(self, num_blocks: int, names_may_collide: bool = False) -> None:
        super().__init__(num_blocks, names_may_collide)
        self._root = _Node(NO_BLOCK, b"", None)
        self._nodes: list[_Node | None] = [None] * num_blocks

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The run of blocks whose contents follow each other from the root."""
        blocks: list[int] = []
        node = self._root
        for index in range(max_blocks):
            child = node.find(chain.content(index))
            if child is None:
                break
            blocks.append(child.block)
            node = child
        chain.adopt([self.names[block] for block in blocks])
        return blocks

    def match_inside(
        self, chain: HashChain, blocks: list[int], max_tokens: int, hidden: Set[int] = NOTHING
    ) -> tuple[int, int]:
        """The child of the last of `blocks` that shares the most of the next tokens."""
        node = self._node(blocks[-1]) if blocks else self._root
        index = len(blocks)
        keys = chain.keys(index)
        wanted = chain.content(index)[: len(keys) + max_tokens * TOKEN_BYTES]
        place = bisect_left(node.keys, wanted)
        best, most = NO_BLOCK, 0
        for neighbour in (node.nearest(place - 1, -1, hidden), node.nearest(place, 1, hidden)):
            if neighbour is not None:
                common = _common_bytes(neighbour.content, wanted) - len(keys)
                if common // TOKEN_BYTES > most:
                    best, most = neighbour.block, common // TOKEN_BYTES
        return best, most

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        """As of any index. Each new name becomes a node."""
        super().publish(blocks, chain, first, last)
        above = self._node(self.owner(blocks[first - 1])) if first else self._root
        for index in range(first, last):
            node = _Node(blocks[index], chain.content(index), above)
            above.add(node)
            self._nodes[node.block] = above = node

    def withdraw_leaves(self, blocks: list[int]) -> int:
        """As of any index. The nodes go with their names."""
        for block in blocks:
            node = self._node(block)
            self._nodes[block] = None
            if node.parent is not None:
                node.parent.remove(node.content)
        return super().withdraw_leaves(blocks)

    def holds(self, block: int, chain: HashChain, block_index: int) -> bool:
        """Whether an owner holds what the chain has at `block_index`; names may collide."""
        parent = chain.names[block_index - 1] if block_index else NO_NAME
        node = self._node(block)
        above = node.parent
        return above is not None and self.names[above.block] == parent and node.content == chain.content(block_index)

    def contradictions(self) -> list[str]:
        """Nodes that don't stand where their names do."""
        wrong: list[str] = []
        found: set[int] = set()
        for branch in self.branches():
            before = branch.before()
            for block in branch.blocks:
                if not self._stands(block, before):
                    wrong.append(f"block {block} and its node in the tree do not belong together")
                before = block
            found.update(branch.blocks)
        strays = [block for block, node in enumerate(self._nodes) if node is not None and block not in found]
        return wrong + [f"block {block} has a node in the tree, but is not found" for block in strays]

    def _stands(self, block: int, before: int) -> bool:
        node = self._nodes[block]
        above = self._nodes[before] if before else self._root
        if node is None or above is None or node.block != block or node.parent is not above:
            return False
        return above.find(node.content) is node and len(node.nodes) == self.num_children(block)

    def clear(self) -> None:
        """Forgets every name."""
        super().clear()
        self._root = _Node(NO_BLOCK, b"", None)
        self._nodes = [None] * len(self.names)

    def _hand_over(self, owner: int, heir: int) -> None:
        super()._hand_over(owner, heir)
        node = self._node(owner)
        node.block = heir
        self._nodes[heir] = node

    def _erase(self, block: int) -> None:
        super()._erase(block)
        self._nodes[block] = None

    def _node(self, block: int) -> _Node:
        node = self._nodes[block]
        assert node is not None, f"block {block} has no node"
        return node


def _common_bytes(one: bytes, other: bytes) -> int:
    length = min(len(one), len(other))
    for index in range(length):
        if one[index] != other[index]:
            return index
    return length
