"""Which blocks begin a prompt: the index behind one interface, as a tree of published names.

A name may belong to several blocks when equal tokens were computed side by side. One of them, the owner, is found;
the others are spares. Owners with spares are held, and so is every spare. A name's parent is the name before it in the
chain, and is published whenever the name is: blocks are published in order and withdrawn last first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Final

from kvmanager.hashing import HashChain

NO_NAME: Final = b""
NO_BLOCK: Final = 0
"""The null block is never published, so it stands for none."""
NOTHING: Final[frozenset[int]] = frozenset()


class PrefixIndex(ABC):
    """Finds published blocks by what they hold, and knows which of them others continue.

    names: the name of each block, NO_NAME for one that isn't published.
    """

    __slots__ = ("_children", "_owners", "_parents", "_spares", "names")

    def __init__(self, num_blocks: int) -> None:
        self.names: list[bytes] = [NO_NAME] * num_blocks
        self._children: dict[int, int] = {}
        """Published names that follow each owner's name, where they are not one: at the ends of chains and where they
        part."""
        self._parents: list[bytes] = [NO_NAME] * num_blocks
        self._owners: dict[bytes, int] = {}
        self._spares: dict[bytes, list[int]] = {}

    @abstractmethod
    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The longest run of published blocks, at most `max_blocks`, that begins the chain."""

    def match_inside(
        self, chain: HashChain, blocks: list[int], max_tokens: int, hidden: Set[int] = NOTHING
    ) -> tuple[int, int]:
        """A published block whose first tokens are the next of the chain behind `blocks`, and how many are.

        At most `max_tokens`, and none of the `hidden` blocks. (NO_BLOCK, 0) when there is none, and always for an index
        that only knows whole blocks.
        """
        return NO_BLOCK, 0

    def owner(self, name: bytes) -> int:
        """The block that is found under `name`; NO_BLOCK for none."""
        return self._owners.get(name, NO_BLOCK)

    def num_children(self, owner: int) -> int:
        """Published names that follow the name of its owner."""
        return self._children.get(owner, 1)

    def continued_once(self, owners: list[int]) -> bool:
        """Whether exactly one published name follows that of each owner."""
        return self._children.keys().isdisjoint(owners)

    def children(self) -> Mapping[int, int]:
        """num_children() of each owner where it is not 1: the index's own, to be read only."""
        return self._children

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        """Makes the blocks at indices first..last-1 of the chain findable; their names are new, those before are not.

        blocks: the whole block table.
        """
        names = chain.names[first:last]
        run = blocks[first:last]
        parent = chain.names[first - 1] if first else NO_NAME
        if parent:
            self._count_children(self._owners[parent], 1)
        owners, own_names, parents = self._owners, self.names, self._parents
        for block, name in zip(run, names, strict=True):
            owners[name] = block
            parents[block] = parent
            own_names[block] = parent = name
        self._children[run[-1]] = 0

    def add_spare(self, block: int, chain: HashChain, block_index: int) -> None:
        """Lines `block` up behind the held block that is found under its name."""
        name = chain.names[block_index]
        self.names[block] = name
        self._parents[block] = chain.names[block_index - 1] if block_index else NO_NAME
        self._spares.setdefault(name, []).append(block)

    def replace(self, owner: int, block: int, chain: HashChain, block_index: int) -> None:
        """Publishes `block` in the place of `owner`, an owner without spares, which is published no more."""
        name = self.names[owner]
        self.names[block], self._parents[block] = name, self._parents[owner]
        self._hand_over(name, owner, block)
        self._erase(owner)

    def withdraw(self, block: int) -> int:
        """Takes a block out that is a spare, has spares or is a leaf.

        The eldest spare takes an owner's place. Returns the owner of the parent when a name has gone with the block,
        NO_BLOCK otherwise.
        """
        name = self.names[block]
        spares = self._spares.get(name)
        if spares is not None:
            if self._owners[name] == block:
                self._hand_over(name, block, spares.pop(0))
            else:
                spares.remove(block)
            if not spares:
                del self._spares[name]
            self._erase(block)
            return NO_BLOCK
        return self.withdraw_leaves([block])

    def withdraw_leaves(self, blocks: list[int]) -> int:
        """Takes out owners without spares that end a chain, the last first, and that nothing else continues.

        Returns the owner of the name before them.
        """
        names, parents, owners = self.names, self._parents, self._owners
        parent = parents[blocks[-1]]
        for block in blocks:
            del owners[names[block]]
            names[block] = parents[block] = NO_NAME
        del self._children[blocks[0]]
        if not parent:
            return NO_BLOCK
        owner = owners[parent]
        self._count_children(owner, -1)
        return owner

    def holds(self, block: int, chain: HashChain, block_index: int) -> bool:
        """Whether a published block holds what the chain has at `block_index`, given that their names are equal."""
        return True

    def is_sole(self, block: int) -> bool:
        """Whether a published block is the owner of its name and has no spares."""
        name = self.names[block]
        return not self._spares or (self._owners[name] == block and name not in self._spares)

    def num_blocks(self, name: bytes) -> int:
        """How many blocks a published name belongs to."""
        return 1 + len(self._spares.get(name, ()))

    def has_spares(self) -> bool:
        """Whether any name belongs to several blocks; without, every published block is the owner of its name."""
        return bool(self._spares)

    def clear(self) -> None:
        """Forgets every name."""
        num_blocks = len(self.names)
        self.names[:] = [NO_NAME] * num_blocks
        self._parents[:] = [NO_NAME] * num_blocks
        self._children.clear()
        self._owners.clear()
        self._spares.clear()

    def __len__(self) -> int:
        """Names that can be found."""
        return len(self._owners)

    def owners(self) -> Mapping[bytes, int]:
        """Each name with its owner: the index's own, to be read only."""
        return self._owners

    def spares(self) -> Iterator[tuple[bytes, int]]:
        """Each name with each of its spares."""
        return iter([(name, block) for name, blocks in self._spares.items() for block in blocks])

    def parent(self, block: int) -> bytes:
        """The name before that of a published block; NO_NAME when it begins a prompt."""
        return self._parents[block]

    def parents_of(self, blocks: Iterable[int]) -> list[bytes]:
        """parent() of each."""
        parents = self._parents
        return [parents[block] for block in blocks]

    def contradictions(self) -> list[str]:
        """What an index finds wrong in what it keeps beside the names; for check()."""
        return []

    def tree(self) -> dict[bytes, list[int]]:
        """The owners by the name that they follow; O(blocks), for people and tools."""
        tree: dict[bytes, list[int]] = {}
        for block in self._owners.values():
            tree.setdefault(self._parents[block], []).append(block)
        return tree

    def _hand_over(self, name: bytes, owner: int, heir: int) -> None:
        self._owners[name] = heir
        if owner in self._children:
            self._children[heir] = self._children.pop(owner)

    def _count_children(self, owner: int, more: int) -> None:
        count = self._children.pop(owner, 1) + more
        if count != 1:
            self._children[owner] = count

    def _erase(self, block: int) -> None:
        self.names[block] = self._parents[block] = NO_NAME


class HashIndex(PrefixIndex):
    """A dictionary of names; where a prompt's end to be found is a binary search."""

    __slots__ = ()

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The run of blocks found under the chain's names."""
        # Every full block of a prompt is published in the end, so that no name is computed in vain.
        chain.compute(max_blocks)
        names, owners = chain.names[:max_blocks], self._owners
        # Before a name that is published all are.
        return [*map(owners.__getitem__, names[: bisect_left(names, True, key=lambda name: name not in owners)])]


class CheckedHashIndex(HashIndex):
    """A HashIndex for names that may collide: it keeps the content of every published block and compares on a hit."""

    __slots__ = ("_contents",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._contents: list[bytes] = [NO_NAME] * num_blocks

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The run of blocks found under the chain's names, each of the same content behind the same parent."""
        chain.compute(max_blocks)
        blocks: list[int] = []
        for index in range(max_blocks):
            block = self.owner(chain.names[index])
            if not block or not self.holds(block, chain, index):
                break
            blocks.append(block)
        return blocks

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        """As of any index. The contents are kept."""
        super().publish(blocks, chain, first, last)
        for index in range(first, last):
            self._contents[blocks[index]] = chain.content(index)

    def add_spare(self, block: int, chain: HashChain, block_index: int) -> None:
        """As of any index. The content is kept."""
        super().add_spare(block, chain, block_index)
        self._contents[block] = chain.content(block_index)

    def replace(self, owner: int, block: int, chain: HashChain, block_index: int) -> None:
        """As of any index. The content is kept."""
        self._contents[block] = self._contents[owner]
        super().replace(owner, block, chain, block_index)

    def holds(self, block: int, chain: HashChain, block_index: int) -> bool:
        """Whether a published block holds what the chain has at `block_index`."""
        parent = chain.names[block_index - 1] if block_index else NO_NAME
        return self._parents[block] == parent and self._contents[block] == chain.content(block_index)

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
