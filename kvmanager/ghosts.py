"""What is remembered of runs of blocks that were given up: eight bytes each, in a table of fixed size."""

from __future__ import annotations

from array import array
from typing import Final

from kvmanager.return_model import OF_A_LEVEL, class_of_level

# A ghost: 15 bits of its name << 46 | time << 26 | blocks << 13 | what is remembered, which is never zero.
_BLOCKS: Final = 13
_TIME: Final = 26
_TAG: Final = 46
_KEPT: Final = (1 << _BLOCKS) - 1
TIMES: Final = 1 << _TAG - _TIME
"""Times are kept modulo this: so many units, 65,536 turnovers of a pool, and few ghosts live a hundred."""
MOST_BLOCKS: Final = (1 << _TIME - _BLOCKS) - 1

MOST_USES: Final = 15
MOST_TURNS: Final = 7
"""Beyond these, uses and turns are not told apart. What is remembered has both and the class but for its level."""


class Ghosts:
    """Pairs of places: the older ghost of a pair makes way. Times are whole numbers that never go back."""

    __slots__ = ("_places",)

    def __init__(self, number: int) -> None:
        self._places = array("Q", [0]) * (number + number % 2)

    def put(self, name: bytes, time: int, blocks: int, kept: int, now: int) -> int:
        """Remembers a number of blocks, MOST_BLOCKS at most, and `kept`, 13 bits that are not all zero, since `time`.

        Returns the ghost that made way, or 0.
        """
        places = self._places
        place, tag = _read(name)
        place %= len(places)
        ghost = places[place]
        if ghost:
            other = places[place ^ 1]
            if not other or waited(other, now) > waited(ghost, now):
                place ^= 1
                ghost = other
        places[place] = tag << _TAG | time % TIMES << _TIME | blocks << _BLOCKS | kept
        return ghost

    def found(self, names: list[bytes]) -> list[int]:
        """The places in `names` of those that take() would find."""
        places, number, found = self._places, len(self._places), list[int]()
        for index, name in enumerate(names):
            # As _read(): a call for each name of a prompt is what this saves.
            place = (name[3] | name[4] << 8 | name[5] << 16 | name[6] << 24) % number
            one, other = places[place], places[place ^ 1]
            if one or other:
                tag = name[1] << 7 | name[2] & 127
                if (one and one >> _TAG == tag) or (other and other >> _TAG == tag):
                    found.append(index)
        return found

    def take(self, name: bytes) -> int:
        """The ghost of `name`, which is one no more, or 0. One time in 16,384 it is another's."""
        places = self._places
        place, tag = _read(name)
        place %= len(places)
        for _ in range(2):
            ghost = places[place]
            if ghost and ghost >> _TAG == tag:
                places[place] = 0
                return ghost
            place ^= 1
        return 0


def _read(name: bytes) -> tuple[int, int]:
    """The place of a name in a table without an end, and its tag."""
    # Byte by byte: compiled these are a few shifts, where int.from_bytes() is a slice, an attribute and a call.
    place = name[3] | name[4] << 8 | name[5] << 16 | name[6] << 24
    return place, name[1] << 7 | name[2] & 127


def waited(ghost: int, now: int) -> int:
    """The time since the one that was remembered."""
    return (now - (ghost >> _TIME)) % TIMES


def blocks_kept(ghost: int) -> int:
    return ghost >> _BLOCKS & MOST_BLOCKS


def kept(ghost: int) -> int:
    """What remembered() made of it."""
    return ghost & _KEPT


def remembered(kind: int, uses: int, turn: int) -> int:
    """What a ghost keeps of blocks of class `kind`, which were used at least once and in a turn from 1 on."""
    return (kind % OF_A_LEVEL * MOST_USES + uses - 1) * MOST_TURNS + turn


def class_kept(ghost: int) -> int:
    """The class that was remembered. Its level is the larger of uses and turn."""
    return _CLASSES[kept(ghost)]


def uses_kept(ghost: int) -> int:
    """The uses that were remembered."""
    return (kept(ghost) - 1) // MOST_TURNS % MOST_USES + 1


def turn_kept(ghost: int) -> int:
    """The turn that was remembered."""
    return (kept(ghost) - 1) % MOST_TURNS + 1


_CLASSES: Final[list[int]] = [0]
"""The class of each thing that a ghost can remember."""
for _kind in range(OF_A_LEVEL):
    for _uses in range(1, MOST_USES + 1):
        _CLASSES.extend(class_of_level(max(_uses, _turn)) + _kind for _turn in range(1, MOST_TURNS + 1))
