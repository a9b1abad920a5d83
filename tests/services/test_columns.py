"""Columns on the wire: the bytes are the same on every machine, and others are refused."""

from array import array

import pytest

from kvmanager.errors import InvalidArgument
from services import columns


def test_numbers_are_little_endian():
    assert columns.to_column([1, 0x01020304, 0xFFFFFFFF]) == b"\x01\0\0\0\x04\x03\x02\x01\xff\xff\xff\xff"
    assert columns.from_column(b"\x04\x03\x02\x01", "x") == array("I", [0x01020304])
    assert columns.to_column([]) == b""


def test_a_machine_of_the_other_byte_order_swaps(monkeypatch):
    there = columns.to_column([0x01020304])
    monkeypatch.setattr(columns, "_SWAPS", not columns._SWAPS)
    assert columns.to_column([0x01020304]) == there[::-1]
    assert columns.from_column(there[::-1], "x") == array("I", [0x01020304])


@pytest.mark.parametrize("number", [-1, 1 << 32])
def test_what_has_no_32_bits_is_refused(number):
    with pytest.raises(OverflowError):
        columns.to_column([number])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_bytes_that_are_no_whole_numbers_are_refused(size):
    with pytest.raises(InvalidArgument, match=f"column asks has {size} bytes"):
        columns.from_column(bytes(size), "asks")


def test_a_column_is_parted_by_counts():
    assert columns.parts(array("I", [7, 8, 9]), [1, 0, 2]) == [array("I", [7]), array("I"), array("I", [8, 9])]
    assert columns.parts(array("I"), []) == []


def test_an_empty_column_says_0_for_all_and_another_length_is_refused():
    assert columns.column_of(b"", "asks", 3) == array("I", [0, 0, 0])
    with pytest.raises(InvalidArgument, match="column asks has 1 entries, and 2 are needed"):
        columns.column_of(bytes(4), "asks", 2)
