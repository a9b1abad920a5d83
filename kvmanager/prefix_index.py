"""Which blocks begin a prompt: the index behind one interface, and the hash index, a dictionary of block names.

A name may belong to several blocks when equal tokens were computed side by side. One of them, the owner, is found;
the others are spares, and every spare is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvmanager.hashing import HashChain


class PrefixIndex(Protocol):
    """Finds published blocks by what they hold."""

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        """The longest run of published blocks, at most `max_blocks`, that begins the chain."""
        ...

    def owner(self, name: bytes) -> int | None:
        """The block that is found under `name`."""
        ...

    def publish(self, name: bytes, block: int) -> None:
        """`block` is found under `name` from now on; behind another block that is already, it is a spare."""
        ...

    def withdraw(self, name: bytes, block: int) -> None:
        """Takes `block` out. If it was the owner, the eldest spare takes its place."""
        ...

    def is_sole(self, name: bytes, block: int) -> bool:
        """Whether `block` is the owner and has no spares."""
        ...

    def owners(self) -> Iterator[tuple[bytes, int]]:
        """Each name with its owner."""
        ...

    def spares(self) -> Iterator[tuple[bytes, int]]:
        """Each name with each of its spares."""
        ...


class HashIndex:
    """A dictionary of names. A match ends at the first name that is missing, so no name behind it is computed."""

    __slots__ = ("_owners", "_spares")

    def __init__(self) -> None:
        self._owners: dict[bytes, int] = {}
        self._spares: dict[bytes, list[int]] = {}

    def match(self, chain: HashChain, max_blocks: int) -> list[int]:
        blocks: list[int] = []
        for index in range(max_blocks):
            block = self._owners.get(chain.name(index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def owner(self, name: bytes) -> int | None:
        return self._owners.get(name)

    def publish(self, name: bytes, block: int) -> None:
        if self._owners.setdefault(name, block) != block:
            self._spares.setdefault(name, []).append(block)

    def withdraw(self, name: bytes, block: int) -> None:
        spares = self._spares.get(name)
        if spares is None:
            del self._owners[name]
            return
        if self._owners[name] == block:
            self._owners[name] = block = spares[0]
        spares.remove(block)
        if not spares:
            del self._spares[name]

    def is_sole(self, name: bytes, block: int) -> bool:
        return self._owners[name] == block and name not in self._spares

    def owners(self) -> Iterator[tuple[bytes, int]]:
        return iter(self._owners.items())

    def spares(self) -> Iterator[tuple[bytes, int]]:
        return ((name, block) for name, blocks in self._spares.items() for block in blocks)
