"""The hash chain: each full block is named by SHA-256 over canonical CBOR of (parent, its tokens, extra keys).

Any language can recompute a name: parent is 32 bytes, the tokens an array of integers, and the extra keys null or an
array of tagged arrays, ["lora", adapter id, adapter version] in every block of an adapter and ["cache_salt", salt] in
the first block, from where the chain carries it on. The layout is that of vLLM's `sha256_cbor`.
"""

from __future__ import annotations

from array import array
from hashlib import sha256

import cbor2

from kvmanager.types import CacheScope

ExtraKeys = tuple[tuple[str, ...], ...] | None


def _digest(value: object) -> bytes:
    return sha256(cbor2.dumps(value, canonical=True)).digest()


NONE_HASH = _digest("vllm-none-hash")
"""The parent of a first block."""


def hash_block(parent: bytes, token_ids: tuple[int, ...], extra_keys: ExtraKeys = None) -> bytes:
    """The 32-byte name of a full block that follows the block named `parent`."""
    return _digest((parent, token_ids, extra_keys))


def extra_keys(scope: CacheScope, block_index: int) -> ExtraKeys:
    """What parts blocks of equal tokens: the adapter in every block, the salt in the first."""
    keys: list[tuple[str, ...]] = []
    if scope.adapter_id:
        keys.append(("lora", scope.adapter_id, scope.adapter_version))
    if scope.salt and block_index == 0:
        keys.append(("cache_salt", scope.salt))
    return tuple(keys) or None


class HashChain:
    """The tokens of one sequence and the names of its full blocks, each computed once, when first asked for."""

    __slots__ = ("_block_size", "_hashes", "_later_keys", "_scope", "token_ids")

    def __init__(self, token_ids: array[int], block_size: int, scope: CacheScope) -> None:
        self.token_ids = token_ids
        self._block_size = block_size
        self._scope = scope
        self._later_keys = extra_keys(scope, 1)
        self._hashes: list[bytes] = []

    def name(self, block_index: int) -> bytes:
        """The name of the full block at `block_index`."""
        while len(self._hashes) <= block_index:
            self._hashes.append(self._next_name())
        return self._hashes[block_index]

    def copy(self) -> HashChain:
        """A chain that goes its own way from here."""
        twin = HashChain(self.token_ids[:], self._block_size, self._scope)
        twin._hashes = self._hashes[:]
        return twin

    def _next_name(self) -> bytes:
        index = len(self._hashes)
        start = index * self._block_size
        tokens = tuple(self.token_ids[start : start + self._block_size])
        if index:
            return hash_block(self._hashes[-1], tokens, self._later_keys)
        return hash_block(NONE_HASH, tokens, extra_keys(self._scope, 0))
