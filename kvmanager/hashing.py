"""The hash chain: each full block is named by a hash over canonical CBOR of (parent, its tokens, extra keys).

Any language can recompute a name. The parent is a byte string, the tokens an array of integers, and the extra keys
null or an array of tagged arrays, in this order: ["lora", adapter id, adapter version] in every block of an adapter;
["mm", content id, offset] for each multimodal span that overlaps the block, the offset counted from the block's first
token; ["cache_salt", salt] in the first block, from where the chain carries it on. The layout and the first parent
are those of vLLM's `sha256_cbor`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import Final, Protocol

import cbor2

from kvmanager.types import BASE_SCOPE, CacheScope, ContentSpan, HashAlgorithm

ExtraKeys = tuple[tuple[str | int, ...], ...] | None


class Hash(Protocol):
    """A hash whose input is complete."""

    def digest(self) -> bytes: ...


HashConstructor = Callable[[bytes], Hash]

_NONE_TEXT: Final = "vllm-none-hash"
_NO_KEYS: Final = b"\xf6"
_INTEGER: Final = 0x00
_BYTES: Final = 0x40
_ARRAY: Final = 0x80
_MAX_ENCODED: Final = 1 << 18
"""Token ids whose CBOR is remembered: more than any known vocabulary has."""
_ENCODED_STEP: Final = 1 << 12

_FEW_TOKENS: Final = 64
"""Fewer are encoded one by one."""
_CHUNK_BLOCKS: Final = 1024
"""Blocks whose tokens are encoded at once, so that all of it stays in the processor's caches."""
_MOST_OTHERS: Final = 6
"""So are all where more than one in so many takes other than three bytes."""
_TWO_BYTES: Final = b"\x19"
"""What stands before an integer of so many bytes."""
_ALL_IF_ZERO: Final = b"\xff" + bytes(255)
"""Translates a byte into a mask: all of another one is kept if it is 0, and nothing otherwise."""


def hash_constructor(algorithm: HashAlgorithm) -> HashConstructor:
    """The hash function, in hashlib's form: 32 bytes for SHA-256, 16 for xxh3-128."""
    if algorithm is HashAlgorithm.SHA256:
        return sha256
    # Imported when a pool asks for it: most pools are named by SHA-256.
    from xxhash import xxh3_128

    return xxh3_128


def none_hash(algorithm: HashAlgorithm) -> bytes:
    """The parent of a first block."""
    return hash_constructor(algorithm)(cbor2.dumps(_NONE_TEXT, canonical=True)).digest()


NONE_HASH: Final = none_hash(HashAlgorithm.SHA256)


def hash_block(
    parent: bytes,
    token_ids: tuple[int, ...],
    extra: ExtraKeys = None,
    algorithm: HashAlgorithm = HashAlgorithm.SHA256,
) -> bytes:
    """The name of a full block that follows the block named `parent`: the rule itself, one block at a time."""
    return hash_constructor(algorithm)(cbor2.dumps((parent, token_ids, extra), canonical=True)).digest()


def extra_keys(
    scope: CacheScope, block_index: int, block_size: int = 16, spans: tuple[ContentSpan, ...] = ()
) -> ExtraKeys:
    """What parts blocks of equal tokens: the adapter and the content of spans in every block, the salt in the first."""
    keys: list[tuple[str | int, ...]] = []
    start = block_index * block_size
    if scope.adapter_id:
        keys.append(("lora", scope.adapter_id, scope.adapter_version))
    for span in spans:
        if span.offset < start + block_size and span.offset + span.length > start:
            keys.append(("mm", span.content_id, span.offset - start))
    if scope.salt and block_index == 0:
        keys.append(("cache_salt", scope.salt))
    return tuple(keys) or None


class HashChain:
    """The tokens of one sequence and the names of its full blocks, each computed once, when first asked for."""

    __slots__ = (
        "_algorithm",
        "_block_size",
        "_later_keys",
        "_new_hash",
        "_none",
        "_scope",
        "_sealed",
        "_spans",
        "names",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: array[int],
        block_size: int,
        scope: CacheScope = BASE_SCOPE,
        spans: tuple[ContentSpan, ...] = (),
        algorithm: HashAlgorithm = HashAlgorithm.SHA256,
    ) -> None:
        self.token_ids = token_ids
        self.names: list[bytes] = []
        """The names computed so far; compute() makes more."""
        self._block_size = block_size
        self._scope = scope
        self._spans = spans
        self._sealed: dict[int, bytes] = {}
        """The CBOR of the extra keys of blocks before a cut that lie in the span that was cut."""
        self._algorithm = algorithm
        self._new_hash = hash_constructor(algorithm)
        self._none = NONE_HASH if algorithm is HashAlgorithm.SHA256 else none_hash(algorithm)
        self._later_keys = _encode_keys(extra_keys(scope, 1, block_size))

    @property
    def scope(self) -> CacheScope:
        return self._scope

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def full_blocks(self) -> int:
        """How many blocks the tokens fill."""
        return len(self.token_ids) // self._block_size

    @property
    def names_may_collide(self) -> bool:
        """Whether somebody can find two contents of one name."""
        return self._algorithm is HashAlgorithm.XXH3

    def name(self, block_index: int) -> bytes:
        """The name of the full block at `block_index`."""
        if len(self.names) <= block_index:
            self.compute(block_index + 1)
        return self.names[block_index]

    def compute(self, num_blocks: int) -> None:
        """Computes the names of the first `num_blocks` blocks; the tokens must fill them."""
        names, size, new_hash, join = self.names, self._block_size, self._new_hash, b"".join
        parent = names[-1] if names else self._none
        before, between = _heads(len(parent), size)
        first = len(names)
        if num_blocks == first + 1:
            # The common case: a sequence grows block by block.
            body = _encode_tokens(self.token_ids[first * size : num_blocks * size])
            names.append(new_hash(join((before, parent, between, body, self.keys(first)))).digest())
            return
        for start in range(first, num_blocks, _CHUNK_BLOCKS):
            for body in self._bodies(start, min(start + _CHUNK_BLOCKS, num_blocks), between):
                parent = new_hash(before + parent + body).digest()
                names.append(parent)

    def _bodies(self, first: int, last: int, between: bytes) -> list[bytes]:
        """What is hashed of the blocks first..last-1 behind their parents."""
        size = self._block_size
        token_ids, later_keys = self.token_ids[first * size : last * size], self._later_keys
        if self._spans or self._sealed:
            bodies = _encode_blocks(token_ids, size, between, b"")
            return [body + self.keys(first + place) for place, body in enumerate(bodies)]
        bodies = _encode_blocks(token_ids, size, between, later_keys)
        if not first:
            bodies[0] = bodies[0].removesuffix(later_keys) + self.keys(0)
        return bodies

    def keys(self, block_index: int) -> bytes:
        """The CBOR of the extra keys of one block."""
        if self._sealed and block_index in self._sealed:
            return self._sealed[block_index]
        if block_index and not self._spans:
            return self._later_keys
        return _encode_keys(extra_keys(self._scope, block_index, self._block_size, self._spans))

    def content(self, block_index: int) -> bytes:
        """What tells a block from others behind the same parent: its extra keys in CBOR, then its tokens, 4 bytes each.

        Of a block that isn't full, the tokens there are.
        """
        return self.keys(block_index) + self.tokens(block_index, block_index + 1)

    def tokens(self, first: int, last: int) -> bytes:
        """The tokens of the blocks first..last-1, as far as there are any, 4 bytes each, the lowest first."""
        return _little_endian(self.token_ids[first * self._block_size : last * self._block_size])

    def adopt(self, names: list[bytes]) -> None:
        """Takes names that are known to be those of the first blocks, when none is computed yet."""
        if not self.names:
            self.names = names

    def truncate(self, num_tokens: int) -> None:
        """Forgets the tokens from `num_tokens` on, the names of the blocks that they were in, and their spans.

        The rest of a span that is cut is content of its own: equal tokens behind it mean something else now. Full
        blocks before stay what they were.
        """
        kept = num_tokens // self._block_size
        self._sealed = {block_index: keys for block_index, keys in self._sealed.items() if block_index < kept}
        spans = [span for span in self._spans if span.offset < num_tokens]
        if spans and spans[-1].offset + spans[-1].length > num_tokens:
            self.compute(kept)
            cut, length = spans[-1], num_tokens - spans[-1].offset
            self._sealed |= {
                block_index: self.keys(block_index) for block_index in range(cut.offset // self._block_size, kept)
            }
            # No caller can give such an id: those are printable.
            spans[-1] = ContentSpan(f"{cut.content_id}\0{length}", cut.offset, length)
        self._spans = tuple(spans)
        del self.token_ids[num_tokens:]
        del self.names[kept:]

    def copy(self) -> HashChain:
        """A chain that goes its own way from here."""
        twin = HashChain(self.token_ids[:], self._block_size, self._scope, self._spans, self._algorithm)
        twin.names = self.names[:]
        twin._sealed = self._sealed.copy()
        return twin


def _encode_blocks(token_ids: array[int], block_size: int, before: bytes, after: bytes) -> list[bytes]:
    """The CBOR of the tokens of each full block, with something before and after it.

    An id from 256 to 65,535 takes three bytes, so all are encoded at once as if they were such, then the others again.
    """
    if len(token_ids) < _FEW_TOKENS:
        return _encode_each(token_ids, block_size, before, after)
    raw = _little_endian(token_ids)
    high = _high_bytes(raw)
    if high.count(0) * _MOST_OTHERS > len(high):
        return _encode_each(token_ids, block_size, before, after)
    columns = bytearray(before + (_TWO_BYTES + b"\0\0") * block_size + after) * (len(token_ids) // block_size)
    step = len(before) + 3 * block_size + len(after)
    for place in range(block_size):
        start = len(before) + 3 * place + 1
        columns[start::step] = high[place::block_size]
        columns[start + 1 :: step] = raw[4 * place :: 4 * block_size]
    encoded = bytes(columns)
    bodies = [encoded[start : start + step] for start in range(0, len(encoded), step)]
    # The last first, so that those before it stay where they are.
    place = high.rfind(0)
    while place >= 0:
        block = place // block_size
        start = len(before) + 3 * (place - block * block_size)
        body = bodies[block]
        bodies[block] = body[:start] + _encode_token(token_ids[place]) + body[start + 3 :]
        place = high.rfind(0, 0, place)
    return bodies


def _encode_each(token_ids: array[int], block_size: int, before: bytes, after: bytes) -> list[bytes]:
    """_encode_blocks() by a table of what each id is in CBOR: many reads all over the memory."""
    return [
        before + _encode_tokens(token_ids[start : start + block_size]) + after
        for start in range(0, len(token_ids), block_size)
    ]


def _little_endian(token_ids: array[int]) -> bytes:
    """The ids, 4 bytes each."""
    if sys.byteorder == "little":
        return token_ids.tobytes()
    swapped = token_ids[:]
    swapped.byteswap()
    return swapped.tobytes()


def _high_bytes(raw: bytes) -> bytes:
    """The higher byte of each id that takes three bytes, which is not 0; 0 for each of the others.

    raw: the ids, in little endian.
    """
    high, third, fourth = raw[1::4], raw[2::4], raw[3::4]
    zeros = bytes(len(high))
    if third == zeros == fourth:
        return high
    fits = [int.from_bytes(column.translate(_ALL_IF_ZERO), "big") for column in (third, fourth)]
    return (int.from_bytes(high, "big") & fits[0] & fits[1]).to_bytes(len(high), "big")


def _encode_token(token_id: int) -> bytes:
    return _encoded[token_id] if token_id < len(_encoded) else _head(_INTEGER, token_id)


def _encode_tokens(token_ids: array[int]) -> bytes:
    try:
        return b"".join([_encoded[token_id] for token_id in token_ids])
    except IndexError:
        highest = max(token_ids)
        if highest >= _MAX_ENCODED:
            return b"".join([_head(_INTEGER, token_id) for token_id in token_ids])
        end = (highest // _ENCODED_STEP + 1) * _ENCODED_STEP
        _encoded.extend([_head(_INTEGER, token_id) for token_id in range(len(_encoded), end)])
        return b"".join([_encoded[token_id] for token_id in token_ids])


def _encode_keys(keys: ExtraKeys) -> bytes:
    return _NO_KEYS if keys is None else bytes(cbor2.dumps(keys, canonical=True))


@lru_cache(maxsize=64)
def _heads(parent_bytes: int, num_tokens: int) -> tuple[bytes, bytes]:
    """What stands before a block's parent, and between that and its tokens."""
    return _head(_ARRAY, 3) + _head(_BYTES, parent_bytes), _head(_ARRAY, num_tokens)


def _head(major: int, number: int) -> bytes:
    """The head of a CBOR item (RFC 8949, 3.1): its major type, and its value, or the length of what follows."""
    if number < 24:
        return bytes((major | number,))
    if number < 1 << 8:
        return bytes((major | 24, number))
    if number < 1 << 16:
        return bytes((major | 25, number >> 8, number & 0xFF))
    return bytes((major | 26,)) + number.to_bytes(4, "big")


_encoded: Final = [_head(_INTEGER, token_id) for token_id in range(256)]
"""The CBOR of each token id up to the highest that was looked up here so far, and some more."""
