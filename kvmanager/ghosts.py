"""What is remembered of blocks that were given up: one word each, in a table of fixed size."""

from __future__ import annotations

from array import array

# A ghost: tag << 42 | time << 16 | what is remembered. It is never zero, because what is remembered is not.
_TAG_BITS, _TIME_BITS, _TIME, _TAG = 20, 26, 16, 42
_KEPT = (1 << _TIME) - 1


class Ghosts:
    """Pairs of places: the older ghost of a pair makes way. Times are whole numbers that never go back."""

    __slots__ = ("_places",)

    def __init__(self, number: int) -> None:
        self._places = array("Q", [0]) * (number + number % 2)

    def put(self, names: list[bytes], time: int, kept: int, now: int) -> list[int]:
        """Remembers `kept`, 16 bits that are not all zero, and a time for each name. Returns ghosts that made way."""
        places, made_way = self._places, list[int]()
        remembered = (time & (1 << _TIME_BITS) - 1) << _TIME | kept
        for name in names:
            key = int.from_bytes(name[1:9], "little")
            place = (key >> _TAG_BITS) % len(places)
            ghost = places[place]
            if ghost:
                other = places[place ^ 1]
                if not other or waited(other, now) > waited(ghost, now):
                    place ^= 1
                    ghost = other
                if ghost:
                    made_way.append(ghost)
            places[place] = (key & (1 << _TAG_BITS) - 1) << _TAG | remembered
        return made_way

    def take(self, name: bytes) -> int:
        """The ghost of `name`, which is one no more, or 0. One time in half a million it is another's."""
        key = int.from_bytes(name[1:9], "little")
        first = (key >> _TAG_BITS) % len(self._places)
        for place in (first, first ^ 1):
            ghost = self._places[place]
            if ghost and ghost >> _TAG == key & (1 << _TAG_BITS) - 1:
                self._places[place] = 0
                return ghost
        return 0

    def some(self, start: int, end: int) -> list[int]:
        return [ghost for ghost in self._places[start:end] if ghost]


def waited(ghost: int, now: int) -> int:
    """The time since the one that was remembered."""
    return now - (ghost >> _TIME) & (1 << _TIME_BITS) - 1


def kept(ghost: int) -> int:
    return ghost & _KEPT
