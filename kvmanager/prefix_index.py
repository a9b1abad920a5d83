"""Which blocks begin a prompt: the index behind one interface, as a tree of published names.

The tree is kept as branches, in each of which every block continues the one before it, and a dictionary has the first
name of each branch alone. So most blocks are found, published and given up as a part of a list: a prompt's names are
compared with those of a branch by a binary search, because a name stands for all before it too.

A name may belong to several blocks when equal tokens were computed side by side. One of them, the owner, is found;
the others are spares. Owners with spares are held, and so is every spare. A name's parent is the name before it in the
chain, and is published whenever the name is: blocks are published in order and withdrawn last first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import Final

from kvmanager.hashing import HashChain

NO_NAME: Final = b""
NO_BLOCK: Final = 0
"""The null block is never published, so it stands for none."""
NOTHING: Final[frozenset[int]] = frozenset()


class Branch:
    """Owners of names, each of which continues the one before it; only its end ever grows or goes.

    depth: the index of the first in its chain. stem: the branch that it grows from; None when it begins a prompt.
    sprouts: how many branches grow from it.
    """

    __slots__ = ("blocks", "depth", "sprouts", "stem")

    def __init__(self, blocks: list[int], depth: int, stem: Branch | None) -> None:
        self.blocks = blocks
        self.depth = depth
        self.stem = stem
        self.sprouts = 0

    def before(self) -> int:
        """The block that the first one continues; NO_BLOCK for none."""
        if self.stem is None:
            return NO_BLOCK
        return self.stem.blocks[self.depth - 1 - self.stem.depth]


_NOWHERE: Final = Branch([], 0, None)


class PrefixIndex(ABC):
    """Finds published blocks by what they hold, and knows which of them others continue.

    names: the name of each block, NO_NAME for one that isn't published. names_may_collide: whether somebody can find
    two contents of one name; then every name is in a dictionary, and means the content that came first.
    """

    __slots__ = ("_branches", "_children", "_heads", "_owners", "_place", "_twins", "names")

    def __init__(self, num_blocks: int, names_may_collide: bool = False) -> None:
        self.names: list[bytes] = [NO_NAME] * num_blocks
        self._children: dict[int, int] = {}
        """Published names that follow each owner's name, where they are not one: at the ends of chains and where they
        part."""
        self._branches: list[Branch] = [_NOWHERE] * num_blocks
        """The branch of each owner; of another block, any."""
        self._heads: dict[bytes, Branch] = {}
        self._twins: dict[bytes, list[int]] = {}
        """The blocks of each name that has several, its owner first."""
        self._owners: dict[bytes, int] | None = {} if names_may_collide else None
        self._place = 0
        """Where the owner that was last looked for is in its branch."""

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

    def find(self, name: bytes, block_index: int, before: int) -> int:
        """The owner of the name at `block_index` of a chain, where `before` is the published block before it.

        NO_BLOCK for none.
        """
        if self._owners is not None:
            return self._owners.get(name, NO_BLOCK)
        if block_index:
            branch = self._branches[self.owner(before)]
            place = block_index - branch.depth
            if place < len(branch.blocks) and self.names[branch.blocks[place]] == name:
                return branch.blocks[place]
        head = self._heads.get(name)
        return NO_BLOCK if head is None else head.blocks[0]

    def end_of_new(self, blocks: list[int], chain: HashChain, first: int, last: int) -> int:
        """The index behind the run of names, from `first` on, that are new; blocks: the whole block table."""
        if self.find(chain.names[first], first, blocks[first - 1]):
            return first
        if self._owners is None:
            # What follows a name that nobody has published is new as well.
            return last
        seen: set[bytes] = set()
        for index in range(first, last):
            name = chain.names[index]
            if name in seen or name in self._owners:
                return index
            seen.add(name)
        return last

    def owner(self, block: int) -> int:
        """The block that is found under the name of a published one: itself, unless it is a spare."""
        if self._twins:
            twins = self._twins.get(self.names[block])
            if twins is not None:
                return twins[0]
        return block

    def twin(self, block: int) -> int:
        """The block that will be found under the name of a published one when that is withdrawn; NO_BLOCK for none."""
        twins = self._twins.get(self.names[block])
        if twins is None:
            return NO_BLOCK
        return twins[1] if twins[0] == block else twins[0]

    def num_children(self, owner: int) -> int:
        """Published names that follow the name of its owner."""
        return self._children.get(owner, 1)

    def continued_once(self, path: list[int]) -> bool:
        """Whether nothing but the one before it follows each owner in a path that ends a chain, the last first."""
        branch = self._branches[path[0]]
        if not branch.sprouts and len(path) <= len(branch.blocks):
            return True
        return self._children.keys().isdisjoint(path[1:])

    def children(self) -> Mapping[int, int]:
        """num_children() of each owner where it is not 1: the index's own, to be read only."""
        return self._children

    def publish(self, blocks: list[int], chain: HashChain, first: int, last: int) -> None:
        """Makes the blocks at indices first..last-1 of the chain findable; their names are new, those before are not.

        blocks: the whole block table.
        """
        run, names = blocks[first:last], chain.names[first:last]
        branch = self._grown(run, names[0], first, blocks[first - 1])
        own_names, branches = self.names, self._branches
        for block, name in zip(run, names):  # noqa: B905 (compiled, a strict zip makes a tuple for each)
            own_names[block] = name
            branches[block] = branch
        self._children[run[-1]] = 0
        if self._owners is not None:
            self._owners.update(zip(names, run, strict=True))

    def add_spare(self, block: int, owner: int) -> None:
        """Lines `block` up behind the held block that is found under its name."""
        name = self.names[block] = self.names[owner]
        self._twins.setdefault(name, [owner]).append(block)

    def replace(self, owner: int, block: int) -> None:
        """Publishes `block` in the place of `owner`, an owner without spares, which is published no more."""
        self.names[block] = self.names[owner]
        self._hand_over(owner, block)
        self._erase(owner)

    def withdraw(self, block: int) -> int:
        """Takes a block out that is a spare, has spares or is a leaf.

        The eldest spare takes an owner's place. Returns the owner of the parent when a name has gone with the block,
        NO_BLOCK otherwise.
        """
        name = self.names[block]
        twins = self._twins.get(name)
        if twins is None:
            return self.withdraw_leaves([block])
        if twins[0] == block:
            self._hand_over(block, twins[1])
        twins.remove(block)
        if len(twins) == 1:
            del self._twins[name]
        self._erase(block)
        return NO_BLOCK

    def withdraw_leaves(self, blocks: list[int]) -> int:
        """Takes out owners without spares that end a chain, the last first, and that nothing else continues.

        Returns the owner of the name before them.
        """
        names = self.names
        if self._owners is not None:
            for block in blocks:
                del self._owners[names[block]]
        branch: Branch | None = self._branches[blocks[0]]
        left, parent = len(blocks), NO_BLOCK
        while left and branch is not None:
            end = branch.blocks
            self._leaving(branch, min(left, len(end)))
            if left < len(end):
                del end[len(end) - left :]
                parent = end[-1]
                break
            del self._heads[names[end[0]]]
            left -= len(end)
            end.clear()
            parent = branch.before()
            branch = branch.stem
            if branch is not None:
                branch.sprouts -= 1
        for block in blocks:
            names[block] = NO_NAME
        del self._children[blocks[0]]
        if parent:
            self._count_children(parent, -1)
        return parent

    def holds(self, block: int, chain: HashChain, block_index: int) -> bool:
        """Whether an owner holds what the chain has at `block_index`, given that their names are equal."""
        return True

    def is_sole(self, block: int) -> bool:
        """Whether a published block is the only one of its name."""
        return self.names[block] not in self._twins

    def num_blocks(self, name: bytes) -> int:
        """How many blocks a published name belongs to."""
        twins = self._twins.get(name)
        return 1 if twins is None else len(twins)

    def has_spares(self) -> bool:
        """Whether any name belongs to several blocks; without, every published block is the owner of its name."""
        return bool(self._twins)

    def clear(self) -> None:
        """Forgets every name."""
        num_blocks = len(self.names)
        self.names[:] = [NO_NAME] * num_blocks
        self._branches[:] = [_NOWHERE] * num_blocks
        self._children.clear()
        self._heads.clear()
        self._twins.clear()
        if self._owners is not None:
            self._owners.clear()

    def __len__(self) -> int:
        """Names that can be found."""
        return sum([len(branch.blocks) for branch in self._heads.values()])

    def branches(self) -> list[Branch]:
        """All branches, to be read only."""
        return list(self._heads.values())

    def owners(self) -> dict[bytes, int]:
        """Each name with its owner; O(blocks), for people and tools."""
        names = self.names
        return {names[block]: block for branch in self._heads.values() for block in branch.blocks}

    def spares(self) -> Iterator[tuple[bytes, int]]:
        """Each name with each of its spares."""
        return iter([(name, block) for name, twins in self._twins.items() for block in twins[1:]])

    def parent(self, block: int) -> int:
        """The owner of the name before that of a published block; NO_BLOCK when it begins a prompt."""
        owner = self.owner(block)
        branch = self._branches[owner]
        place = self._place_of(owner)
        return branch.blocks[place - 1] if place else branch.before()

    def contradictions(self) -> list[str]:
        """What an index finds wrong in what it keeps beside sound branches; for check()."""
        return []

    def broken_branches(self) -> list[str]:
        """What is wrong with the branches, so that nothing else can be read from them; for check()."""
        names, branches = self.names, self._branches
        wrong: list[str] = []
        sprouts = Counter([branch.stem for branch in self._heads.values()])
        for name, branch in self._heads.items():
            if branch.sprouts != sprouts[branch]:
                wrong.append(f"{sprouts[branch]} branches grow from that of {name.hex()[:16]}, not {branch.sprouts}")
            if not branch.blocks or names[branch.blocks[0]] != name:
                wrong.append(f"the index finds {branch.blocks[:1]} under {name.hex()[:16]}, which is not their name")
            elif list(map(branches.__getitem__, branch.blocks)).count(branch) != len(branch.blocks):
                wrong.append(f"a block behind block {branch.blocks[0]} is somewhere else in the index, too")
            stem = branch.stem
            if stem is not None and not 0 <= branch.depth - 1 - stem.depth < len(stem.blocks):
                wrong.append(f"{branch.blocks[:1]} follows a block that the index does not have")
        return wrong

    def tree(self) -> dict[bytes, list[int]]:
        """The owners by the name that they follow; O(blocks), for people and tools."""
        names = self.names
        tree: dict[bytes, list[int]] = {}
        for branch in self._heads.values():
            parent = names[branch.before()]
            for block in branch.blocks:
                tree.setdefault(parent, []).append(block)
                parent = names[block]
        return tree

    def _grown(self, run: list[int], name: bytes, depth: int, before: int) -> Branch:
        """The branch that new blocks belong to, which it has now."""
        stem: Branch | None = None
        if depth:
            parent = self.owner(before)
            self._count_children(parent, 1)
            stem = self._branches[parent]
            if stem.blocks[-1] == parent:
                stem.blocks += run
                return stem
            stem.sprouts += 1
        branch = self._heads[name] = Branch(run, depth, stem)
        return branch

    def _leaving(self, branch: Branch, count: int) -> None:
        """The last `count` blocks of a branch, or all, are taken out next: for an index that keeps more of them."""
        return

    def _hand_over(self, owner: int, heir: int) -> None:
        branch = self._branches[heir] = self._branches[owner]
        branch.blocks[self._place_of(owner)] = heir
        if self._owners is not None:
            self._owners[self.names[owner]] = heir
        if owner in self._children:
            self._children[heir] = self._children.pop(owner)

    def _place_of(self, owner: int) -> int:
        """Where in its branch an owner is. Neighbours of the one that was last looked for are found at once."""
        blocks, near = self._branches[owner].blocks, self._place
        if 0 < near <= len(blocks) and blocks[near - 1] == owner:
            self._place = near - 1
        elif near + 1 < len(blocks) and blocks[near + 1] == owner:
            self._place = near + 1
        else:
            self._place = blocks.index(owner)
        return self._place

    def _count_children(self, owner: int, more: int) -> None:
        count = self._children.pop(owner, 1) + more
        if count != 1:
            self._children[owner] = count

    def _erase(self, block: int) -> None:
        self.names[block] = NO_NAME
