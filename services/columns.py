"""Columns of a Session message: unsigned integers of 32 bits, little-endian, one after the other."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Final

from kvmanager.errors import InvalidArgument

ENTRY_BYTES: Final = 4
_SWAPS: Final = sys.byteorder == "big"

assert array("I").itemsize == ENTRY_BYTES, "an unsigned int of this platform is not 32 bits"


def to_column(numbers: Iterable[int]) -> bytes:
    """Numbers of 0 to 2^32-1 as they go on the wire. Raises OverflowError for others."""
    column = array("I", numbers)
    if _SWAPS:
        column.byteswap()
    return column.tobytes()


def from_column(data: bytes, name: str) -> array[int]:
    """The numbers of a column. Raises InvalidArgument when its bytes are no whole numbers; `name` is its field."""
    if len(data) % ENTRY_BYTES:
        raise InvalidArgument(
            f"column {name} has {len(data)} bytes, which is no multiple of {ENTRY_BYTES}", bytes=len(data), field=name
        )
    column = array("I")
    column.frombytes(data)
    if _SWAPS:
        column.byteswap()
    return column


def column_of(data: bytes, name: str, count: int) -> array[int]:
    """A column of `count` entries; an empty one says 0 for all. Raises InvalidArgument for another length."""
    column = from_column(data, name)
    if not column:
        return array("I", bytes(ENTRY_BYTES * count))
    if len(column) != count:
        raise InvalidArgument(
            f"column {name} has {len(column)} entries, and {count} are needed", entries=len(column), field=name
        )
    return column


def parts(column: array[int], counts: Iterable[int]) -> list[array[int]]:
    """The column in parts of so many entries each; the counts add up to its length."""
    found: list[array[int]] = []
    start = 0
    for count in counts:
        end = start + count
        found.append(column[start:end])
        start = end
    return found
