"""What the trial takes for hits of LRU and of the policy, by hand; and that it gives way to LRU and comes back."""

from kvmanager.return_model import AGES, CLASSES
from kvmanager.trial import Trial

OLD, YOUNG = 5, 2
GOOD, BAD = 3 * AGES, 7 * AGES
"""The first cells of two classes."""


def worths(good: float, bad: float) -> list[float]:
    worth = [0.0] * (CLASSES * AGES)
    worth[GOOD : GOOD + AGES] = [good] * AGES
    worth[BAD : BAD + AGES] = [bad] * AGES
    return worth


WAITING = {GOOD + YOUNG: 10, GOOD + OLD: 30, BAD + YOUNG: 30, BAD + OLD: 40}


def looked(uses: dict[int, int], room: int, worth: list[float], found: int = 0) -> Trial:
    trial = Trial()
    for cell, count in uses.items():
        trial.used(cell, count, False)
    trial.judge(worth, WAITING, room)
    return trial


def test_lru_has_the_youngest_and_the_policy_what_is_worth_most() -> None:
    uses = {GOOD + YOUNG: 100, GOOD + OLD: 1_000, BAD + YOUNG: 10, BAD + OLD: 10_000}
    # Room for 40: LRU has the young of both classes, the policy all of the good one.
    trial = looked(uses, 40, worths(2.0, 1.0))
    assert (trial._lru_hits, trial._lead) == (110.0, 1_100.0 - 110.0)
    assert trial.trusted
    # Room for 75: 35 of the 70 old ones, or the 35 youngest of the bad ones: 30, and 5 of 40.
    trial = looked(uses, 75, worths(2.0, 1.0))
    assert (trial._lru_hits, trial._lead) == (110.0 + 5_500.0, 1_110.0 + 1_250.0 - 5_610.0)
    assert not trial.trusted


def test_equal_worths_are_the_order_of_lru() -> None:
    uses = {GOOD + YOUNG: 7, GOOD + OLD: 50, BAD + YOUNG: 3, BAD + OLD: 90}
    for room in (0, 10, 40, 60, 500):
        trial = looked(uses, room, worths(1.0, 1.0))
        assert trial._lead == 0.0
        assert not trial.trusted


def test_what_was_given_up_does_not_come_back_for_getting_older() -> None:
    worth = worths(0.0, 1.0)
    worth[GOOD + OLD] = 9.0
    trial = looked({GOOD + OLD: 1_000, BAD + OLD: 10}, 70, worth)
    assert trial._lead + trial._lru_hits == 10.0


def test_a_use_of_what_nobody_waits_for_any_more_needs_no_room() -> None:
    trial = looked({GOOD + 1: 5}, 10, worths(1.0, 1.0))
    assert trial._lru_hits == 5.0


def test_a_small_lead_is_not_enough_at_once() -> None:
    # A policy that is ahead by 3 % of LRU's hits at one look has a deviation as large as its lead.
    uses = {GOOD + YOUNG: 1_000, GOOD + OLD: 30}
    assert not looked(uses, 40, worths(2.0, 1.0)).trusted
    assert looked(uses | {GOOD + OLD: 40}, 40, worths(2.0, 1.0)).trusted
    trial = looked(uses, 40, worths(2.0, 1.0))
    for cell, count in uses.items():
        trial.used(cell, count, False)
    trial.judge(worths(2.0, 1.0), WAITING, 40)
    assert trial.trusted


def test_a_policy_that_decides_is_judged_by_the_hits_that_it_has() -> None:
    good = {GOOD + YOUNG: 100, GOOD + OLD: 1_000}
    trial = looked(good, 40, worths(2.0, 1.0))
    assert trial.trusted
    # It should have had 1,100 each time, and had none.
    looks = 0
    while trial.trusted:
        for cell, count in good.items():
            trial.used(cell, count, False)
        trial.judge(worths(2.0, 1.0), WAITING, 40)
        looks += 1
    assert 2 <= looks < 20
    # It is foreseen to be ahead again, and decides again once that outweighs what it lost.
    for _ in range(5):
        for cell, count in good.items():
            trial.used(cell, count, False)
        trial.judge(worths(2.0, 1.0), WAITING, 40)
    assert trial.trusted
