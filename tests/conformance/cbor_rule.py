"""The names of blocks computed a second time, by hand: the CBOR (RFC 8949) is written here byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

Key = tuple[str | int, ...]

NONE_HASH = sha256(b"\x6evllm-none-hash").digest()


def head(major: int, number: int) -> bytes:
    """A major type with its number, in the fewest bytes."""
    if number < 24:
        return bytes([major << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([major << 5 | code]) + number.to_bytes(size, "big")
    raise ValueError(number)


def item(value: str | int) -> bytes:
    """A text or an integer."""
    if isinstance(value, str):
        text = value.encode()
        return head(3, len(text)) + text
    return head(0, value) if value >= 0 else head(1, -1 - value)


def block_hash(parent: bytes, tokens: Sequence[int], keys: Sequence[Key] = ()) -> bytes:
    """SHA-256 over the array of parent, tokens and extra keys; null in the place of no keys."""
    told = head(4, len(keys)) + b"".join(head(4, len(key)) + b"".join(map(item, key)) for key in keys)
    body = head(4, len(tokens)) + b"".join(map(item, tokens))
    return sha256(head(4, 3) + head(2, len(parent)) + parent + body + (told if keys else b"\xf6")).digest()


def chain(tokens: Sequence[int], keys: Sequence[Sequence[Key]] = (), block_size: int = 16) -> list[bytes]:
    """The names of the full blocks of a prompt; `keys` has those of the first blocks, the others have none."""
    names: list[bytes] = []
    for index in range(len(tokens) // block_size):
        parent = names[-1] if names else NONE_HASH
        block = tokens[index * block_size : (index + 1) * block_size]
        names.append(block_hash(parent, block, keys[index] if index < len(keys) else ()))
    return names
