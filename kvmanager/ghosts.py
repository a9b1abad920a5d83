"""What is remembered of blocks that were given up: five bytes each, in a table of fixed size."""

from __future__ import annotations

from array import array
from typing import Final

from kvmanager.return_model import AGES, OF_A_LEVEL, class_of_level

# A ghost: 7 bits of its tag << 25 | time << 13 | what is remembered; never zero, because what is remembered is not.
_TIME: Final = 13
_TAG: Final = 25
TIMES: Final = 1 << _TAG - _TIME
"""Times are kept modulo this."""
_KEPT: Final = (1 << _TIME) - 1

MOST_USES: Final = 15
MOST_TURNS: Final = 7
"""Beyond these, uses and turns are not told apart. What is remembered has both and the class but for its level."""


class Ghosts:
    """Pairs of places: the older ghost of a pair makes way. Times are whole numbers that never go back.

    They are kept modulo TIMES: a ghost that old looks new. Few live as long, where a turnover of the pool is 64.
    """

    __slots__ = ("_places", "_tags")

    def __init__(self, number: int) -> None:
        self._places = array("I", [0]) * (number + number % 2)
        self._tags = bytearray(len(self._places))
        """The other 8 bits of each ghost's tag."""

    def put(self, names: list[bytes], time: int, kept: int, now: int) -> list[int]:
        """Remembers `kept`, 13 bits that are not all zero, and a time for each name. Returns ghosts that made way."""
        places, tags, made_way = self._places, self._tags, list[int]()
        number, remembered = len(places), time % TIMES << _TIME | kept
        for name in names:
            place, tag, low_tag = _read(name)
            place %= number
            ghost = places[place]
            if ghost:
                other = places[place ^ 1]
                if not other or waited(other, now) > waited(ghost, now):
                    place ^= 1
                    ghost = other
                if ghost:
                    made_way.append(ghost)
            places[place] = low_tag << _TAG | remembered
            tags[place] = tag
        return made_way

    def take(self, name: bytes) -> int:
        """The ghost of `name`, which is one no more, or 0. One time in 16,384 it is another's."""
        place, tag, low_tag = _read(name)
        place %= len(self._places)
        for _ in range(2):
            if self._tags[place] == tag:
                ghost = self._places[place]
                if ghost and ghost >> _TAG == low_tag:
                    self._places[place] = 0
                    return ghost
            place ^= 1
        return 0

    def some(self, start: int, end: int) -> list[int]:
        """The ghosts in these places."""
        return [ghost for ghost in self._places[start:end].tolist() if ghost]

    def count(self, start: int, end: int, now: int, age_buckets: bytes, counts: list[int]) -> None:
        """Adds each of some() to the count of the model's cell that it is in. age_buckets: by the time waited."""
        rows, wrap = _ROWS, TIMES - 1
        for ghost in self._places[start:end].tolist():
            if ghost:
                counts[rows[ghost & _KEPT] + age_buckets[now - (ghost >> _TIME) & wrap]] += 1


def _read(name: bytes) -> tuple[int, int, int]:
    """The place of a name in a table without an end, and the 8 and 7 bits of its tag."""
    # Byte by byte: compiled these are a few shifts, where int.from_bytes() is a slice, an attribute and a call.
    place = name[3] >> 4 | name[4] << 4 | name[5] << 12 | name[6] << 20 | name[7] << 28 | name[8] << 36
    return place, name[1], name[2] & 127


def waited(ghost: int, now: int) -> int:
    """The time since the one that was remembered."""
    return (now - (ghost >> _TIME)) % TIMES


def kept(ghost: int) -> int:
    return ghost & _KEPT


def remembered(kind: int, uses: int, turn: int) -> int:
    """What a ghost keeps of a block of class `kind`, which was used at least once and in a turn from 1 on."""
    return (kind % OF_A_LEVEL * MOST_USES + uses - 1) * MOST_TURNS + turn


def class_kept(ghost: int) -> int:
    """The class that was remembered. Its level is the larger of uses and turn."""
    return _CLASSES[ghost & _KEPT]


def uses_kept(ghost: int) -> int:
    """The uses that were remembered."""
    return ((ghost & _KEPT) - 1) // MOST_TURNS % MOST_USES + 1


def turn_kept(ghost: int) -> int:
    """The turn that was remembered."""
    return ((ghost & _KEPT) - 1) % MOST_TURNS + 1


_CLASSES: Final[list[int]] = [0]
"""The class of each thing that a ghost can remember."""
for _kind in range(OF_A_LEVEL):
    for _uses in range(1, MOST_USES + 1):
        _CLASSES.extend(class_of_level(max(_uses, _turn)) + _kind for _turn in range(1, MOST_TURNS + 1))

_ROWS: Final = [kind * AGES for kind in _CLASSES]
"""The first cell of each class."""
