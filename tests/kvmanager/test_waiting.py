"""Blocks that wait, against a list of them."""

import random

from kvmanager.return_model import AGES, CLASSES, age_bucket
from kvmanager.waiting import Waiting


def test_what_waits_is_what_began_and_has_not_ended() -> None:
    rng = random.Random(1)
    waiting, lives = Waiting(), list[tuple[int, int]]()
    for now in range(2_000):
        kind, count = rng.choice((0, 5, CLASSES - 1)), rng.randrange(1, 40)
        waiting.add(kind, now, count)
        lives += [(kind, now)] * count
        while len(lives) > 300:
            kind, time = rng.choice(lives)
            waiting.remove(kind, time, 1)
            lives.remove((kind, time))
        if now % 100 == 0:
            cells = [kind * AGES + age_bucket(now - time) for kind, time in lives]
            assert waiting.by_cell(now) == {cell: cells.count(cell) for cell in cells}


def test_nothing_is_kept_of_what_has_ended() -> None:
    waiting = Waiting()
    waiting.add(3, 10, 5)
    waiting.remove(3, 10, 2)
    assert waiting.by_cell(10) == {3 * AGES: 3}
    waiting.remove(3, 10, 3)
    assert waiting.by_cell(10) == {}
    assert not waiting._counts
