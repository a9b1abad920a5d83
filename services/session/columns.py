"""Columns of the Session stream: unsigned integers of 32 bits, little-endian, one after the other, as bytes."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_SWAPPED = sys.byteorder != "little"


def pack(values: Iterable[int]) -> bytes:
    """A column of integers from 0 to 2**32 - 1. Raises OverflowError for others."""
    column = array("I", values)
    if _SWAPPED:
        column.byteswap()
    return column.tobytes()


def unpack(column: bytes) -> list[int]:
    """The integers of a column. Raises ValueError when its length is no multiple of four."""
    values = array("I")
    values.frombytes(column)
    if _SWAPPED:
        values.byteswap()
    return values.tolist()
