"""How values of settings are read and checked, with sentences that say what is allowed."""

from __future__ import annotations

import re

from kvmanager.types import MAX_BLOCKS

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
"""Tokens in a block that the model runner's kernels take."""

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_BYTES = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[A-Za-z]*)")


def parse_bytes(value: object) -> int:
    """Reads bytes: an int, or text such as '512MiB', '1.5 GiB', '2GB'. ValueError with a sentence otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _BYTES.fullmatch(str(value).strip())
    factor = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{value!r} is no amount of memory; write bytes or a unit, like 512MiB or 1.5GiB")
    return int(float(match["number"]) * factor)


def parse_optional_bytes(value: object) -> int | None:
    """parse_bytes() for a setting that may be left out."""
    return None if value is None else parse_bytes(value)


def parse_number(value: object) -> object:
    """Reads a whole number. ValueError with a sentence for anything else; None passes."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    text = str(value).strip()
    if not re.fullmatch(r"[+-]?[0-9]{1,19}", text):
        raise ValueError(f"{value!r} is no whole number")
    return int(text)


def check_block_size(value: int) -> int:
    """Refuses a block size that no kernel takes."""
    if value not in BLOCK_SIZES:
        raise ValueError(f"a block of {value} tokens is not possible; take one of {', '.join(map(str, BLOCK_SIZES))}")
    return value


def check_num_blocks(value: int | None) -> int | None:
    """Refuses a pool that could hold nothing, or that is too large to keep books of; None passes."""
    if value is not None and not 2 <= value <= MAX_BLOCKS:
        raise ValueError(
            f"a pool of {value} blocks is not possible; take 2 to {MAX_BLOCKS} (block 0 is the null block, which holds "
            "nothing)"
        )
    return value
