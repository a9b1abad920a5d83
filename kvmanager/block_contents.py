"""What the blocks of one branch hold, end to end, in as few bytes for each token as the largest id of the branch takes.

A block's content is its extra keys in CBOR and then its tokens, 4 bytes each (`HashChain.content`). Kept are 2, 3 or 4
bytes of each token, and the keys that differ from those of most blocks.
"""

from __future__ import annotations

from typing import Final

from kvmanager.hashing import HashChain

TOKEN_BYTES: Final = 4
_LEAST_BYTES: Final = 2


class BlockContents:
    """The contents of the blocks of a branch; only its end ever grows or goes. block_size: in tokens."""

    __slots__ = ("_block_size", "_keys", "_other_keys", "_tokens", "_width")

    def __init__(self, block_size: int, keys: bytes) -> None:
        self._block_size = block_size
        self._keys = keys
        """The extra keys of most blocks."""
        self._other_keys: dict[int, bytes] = {}
        """Those of the others, by their place."""
        self._width = _LEAST_BYTES
        """Bytes of each token, the lowest first."""
        self._tokens = bytearray()

    def __len__(self) -> int:
        """Blocks."""
        return len(self._tokens) // (self._block_size * self._width)

    def keys(self, place: int) -> bytes:
        """The extra keys of one block, in CBOR."""
        return self._other_keys.get(place, self._keys)

    def content(self, place: int) -> bytes:
        """The content of one block."""
        step = self._block_size * self._width
        narrow = self._tokens[place * step : (place + 1) * step]
        wide = bytearray(self._block_size * TOKEN_BYTES)
        for byte in range(self._width):
            wide[byte::TOKEN_BYTES] = narrow[byte :: self._width]
        return self.keys(place) + bytes(wide)

    def extend(self, chain: HashChain, first: int, last: int) -> None:
        """Adds the blocks at indices first..last-1 of a chain."""
        place = len(self)
        for index in range(first, last):
            keys = chain.keys(index)
            if keys != self._keys:
                self._other_keys[place + index - first] = keys
        wide = chain.tokens(first, last)
        width = TOKEN_BYTES
        while width > self._width and not wide[width - 1 :: TOKEN_BYTES].lstrip(b"\0"):
            width -= 1
        if width > self._width:
            self._tokens = bytearray(_resized(bytes(self._tokens), self._width, width))
            self._width = width
        self._tokens += _resized(wide, TOKEN_BYTES, width)

    def shorten(self, count: int) -> None:
        """Forgets the last `count` blocks."""
        kept = len(self) - count
        del self._tokens[kept * self._block_size * self._width :]
        for place in [place for place in self._other_keys if place >= kept]:
            del self._other_keys[place]

    def num_equal(self, chain: HashChain, first: int, most: int) -> int:
        """How many of its first `most` blocks hold what the chain has from index `first` on, one after another."""
        most = min(most, len(self))
        wide = chain.tokens(first, first + most)
        for byte in range(self._width, TOKEN_BYTES):
            column = wide[byte::TOKEN_BYTES]
            most = min(most, (len(column) - len(column.lstrip(b"\0"))) // self._block_size)
        step = self._block_size * self._width
        own, asked = self._tokens[: most * step], _resized(wide, TOKEN_BYTES, self._width)[: most * step]
        whole = own == asked
        for place in range(most):
            start, end = place * step, (place + 1) * step
            if self.keys(place) != chain.keys(first + place):
                return place
            if not whole and own[start:end] != asked[start:end]:
                return place
        return most


def _resized(tokens: bytes, old: int, new: int) -> bytes:
    """Tokens of `old` bytes each as `new` bytes each, the lowest first; bytes that are cut off are lost."""
    if old == new:
        return tokens
    resized = bytearray(len(tokens) // old * new)
    for byte in range(min(old, new)):
        resized[byte::new] = tokens[byte::old]
    return bytes(resized)
