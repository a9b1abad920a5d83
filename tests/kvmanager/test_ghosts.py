"""The table of ghosts against the arithmetic of balls in pairs of places."""

from hashlib import sha256
from math import exp

import pytest

from kvmanager.ghosts import (
    MOST_BLOCKS,
    MOST_TURNS,
    MOST_USES,
    TIMES,
    Ghosts,
    blocks_kept,
    class_kept,
    kept,
    remembered,
    turn_kept,
    uses_kept,
    waited,
)
from kvmanager.return_model import class_of


def name(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


@pytest.mark.parametrize("load", [0.5, 0.75, 2.0])
def test_how_many_are_still_there(load: float) -> None:
    places = 20_000
    number = int(load * places)
    ghosts = Ghosts(places)
    made_way = sum(ghosts.put(name(each), each, 1, 1 + each % 1_000, each) > 0 for each in range(number))
    taken = [each for each in range(number) if ghosts.take(name(each))]
    assert len(taken) == number - made_way
    # A pair is named by Poisson(2 load) ghosts and keeps two of them at most.
    mean = 2 * load
    pairs = 2 - exp(-mean) * (2 + mean)
    assert len(taken) == pytest.approx(pairs * places / 2, rel=0.02)
    # A pair keeps its newest two, so the newest two of all are there.
    assert {number - 2, number - 1} <= set(taken)


def test_a_ghost_keeps_what_it_was_given() -> None:
    ghosts = Ghosts(8)
    assert ghosts.put(name(1), 70, MOST_BLOCKS, 0x1BCD, 100) == 0
    ghost = ghosts.take(name(1))
    assert (kept(ghost), waited(ghost, 100), blocks_kept(ghost)) == (0x1BCD, 30, MOST_BLOCKS)
    assert ghosts.take(name(1)) == 0


def test_a_name_is_told_from_others_by_its_tag() -> None:
    ghosts = Ghosts(2)
    ghosts.put(name(0), 0, 1, 1, 0)
    assert sum(ghosts.take(name(each)) > 0 for each in range(1, 3_000)) <= 1
    # A number of 61 bits is a small one to the compiler.
    ghosts = Ghosts(2)
    ghosts.put(b"\xff" * 32, TIMES - 1, MOST_BLOCKS, 0x1FFF, 0)
    assert 1 << 60 <= ghosts.take(b"\xff" * 32) < 1 << 61


def test_what_is_remembered_comes_back() -> None:
    seen: set[int] = set()
    for uses in range(1, MOST_USES + 1):
        for turn in range(1, MOST_TURNS + 1):
            for fresh in (1, 7, 31, 99, 100):
                for tail in (0, 1):
                    kind = class_of(max(uses, turn), fresh, 9, tail)
                    seen.add(known := remembered(kind, uses, turn))
                    assert (class_kept(known), uses_kept(known), turn_kept(known)) == (kind, uses, turn)
    assert len(seen) == MOST_USES * MOST_TURNS * 5 * 2
    assert min(seen) > 0
    assert max(seen) < 1 << 13


def test_a_ghost_waits_up_to_the_end_of_its_clock() -> None:
    ghosts = Ghosts(8)
    ghosts.put(name(1), TIMES + 10_000, 1, 1, TIMES + 10_000)
    assert waited(ghosts.take(name(1)), 2 * TIMES + 9_999) == TIMES - 1
