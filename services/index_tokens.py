"""The tokens behind the names of a pool's prefix index, from what its runner knows of its own sequences.

The KV manager's events have names and no tokens. The runner has computed every block of its pool, so it can name them
too: the same chain of hashes over the same tokens and salt. A name that fits is proof that the tokens do.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from typing import NamedTuple

from kvmanager.hashing import HashChain
from kvmanager.types import CacheScope, HashAlgorithm
from services.columns import from_column
from services.session.tap import Glance, Told

SPARE_NAMES = 4096
"""New names that come before the others are looked through."""


class NamedBlock(NamedTuple):
    """A full block. parent: the name before it, empty for one that begins a prompt."""

    parent: bytes
    tokens: array[int]
    salt: str


class IndexTokens:
    """The blocks of a runner's sequences by name. Belongs to one thread."""

    def __init__(self, block_size: int, algorithm: HashAlgorithm) -> None:
        self._block_size = block_size
        self._algorithm = algorithm
        self._chains: dict[int, HashChain] = {}
        self._named: dict[bytes, NamedBlock] = {}
        self._room = SPARE_NAMES
        self._spare: set[bytes] = set()
        """Names that nobody had when there were many."""

    def block(self, name: bytes) -> NamedBlock | None:
        """The block of this name; None for one that no known sequence has."""
        return self._named.get(name)

    def take(self, news: Iterable[Told]) -> None:
        """Takes in what a tap was told. News that are known already change nothing."""
        for told in news:
            if told.salt is not None:
                self._chains[told.handle] = self._chain(told.salt)
            chain = self._chains.get(told.handle)
            if chain is None:
                continue
            if told.tokens is not None:
                self._extend(chain, told.start, told.tokens)
            elif told.start >= 0:
                self._cut(chain, told.start)
            else:
                del self._chains[told.handle]

    def seed(self, glance: Glance) -> None:
        """Takes in what was held before a tap was listened to. Its parts may contradict each other: then some blocks
        get names that the index does not have."""
        name_of: dict[int, bytes] = {}
        for handle, salt, tokens, blocks in glance.sequences:
            chain = self._chains[handle] = self._chain(salt)
            self._extend(chain, 0, tokens)
            name_of.update(zip(blocks, chain.names, strict=False))
        for block in glance.cached:
            self._name_cached(block, glance, name_of)

    def keep(self, index: Container[bytes]) -> None:
        """Forgets names that neither a live sequence nor the index has, nor had the last time that there were many.

        The index may hear of a block only after its sequence has ended.
        """
        if len(self._named) <= self._room:
            return
        live = {name for chain in self._chains.values() for name in chain.names}
        spare = {name for name in self._named if name not in live and name not in index}
        for name in spare & self._spare:
            del self._named[name]
        self._spare = spare
        self._room = len(self._named) + SPARE_NAMES

    def _chain(self, salt: str) -> HashChain:
        return HashChain(array("I"), self._block_size, CacheScope(salt=salt), algorithm=self._algorithm)

    def _extend(self, chain: HashChain, start: int, tokens: array[int]) -> None:
        known = len(chain.token_ids)
        if start > known:
            # What came before is not known, so nothing behind it can be named.
            return
        chain.token_ids.extend(tokens[known - start :])
        first, full = len(chain.names), len(chain.token_ids) // self._block_size
        chain.compute(full)
        for index in range(first, full):
            body = chain.token_ids[index * self._block_size : (index + 1) * self._block_size]
            parent = chain.names[index - 1] if index else b""
            self._named[chain.names[index]] = NamedBlock(parent, body, chain.scope.salt)

    def _cut(self, chain: HashChain, num_tokens: int) -> None:
        if num_tokens < len(chain.token_ids):
            chain.truncate(num_tokens)

    def _name_cached(self, block: int, glance: Glance, name_of: dict[int, bytes]) -> None:
        """Names a cached block, and before that those that come before it."""
        path: dict[int, None] = {}
        while block in glance.cached and block not in name_of and block not in path:
            path[block] = None
            block = glance.cached[block].parent
        for each in reversed(path):
            cached = glance.cached[each]
            parent = name_of.get(cached.parent, b"")
            if cached.parent and not parent:
                return
            tokens = array("I", from_column(cached.tokens, "tokens"))
            chain = self._chain("" if parent else cached.salt)
            if parent:
                chain.adopt([parent])
                # The name before stands for its tokens, which are not looked at again.
                chain.token_ids.extend(tokens)
            chain.token_ids.extend(tokens)
            name_of[each] = name = chain.name(1 if parent else 0)
            self._named[name] = NamedBlock(parent, tokens, cached.salt)
