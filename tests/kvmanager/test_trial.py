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


def look(trial: Trial, uses: dict[int, int], room: int, worth: list[float]) -> None:
    """All the uses were misses."""
    trial.count_anew()
    for cell, count in uses.items():
        trial.used(cell, count, False)
    trial.judge(worth, WAITING, room)


def looked(uses: dict[int, int], room: int, worth: list[float]) -> Trial:
    trial = Trial()
    look(trial, uses, room, worth)
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


def test_those_that_have_passed_a_dip_are_alike_whatever_their_age() -> None:
    # Nobody comes back soon: worth rises until a block is old. Of the good class half is kept from the start, so half
    # of the old ones would be there: not the young ones first, as of blocks whose worth only falls.
    worth = worths(2.0, 1.0)
    worth[GOOD + 1 : GOOD + AGES] = [4.0] * (AGES - 1)
    trial = looked({GOOD + OLD: 1_000}, 20, worth)
    assert (trial._lru_hits, trial._lead) == (0.0, 500.0)


def test_worths_that_know_the_uses_are_believed_at_the_second_look_and_if_they_are_far_ahead() -> None:
    # With room for 40 LRU would have had the young of the bad class, the policy the old of the good one: 100 instead
    # of 10. If the 110 uses came 11 at a time, they count as 10, and 90 is 2.59 deviations; if 12 at a time, 2.48.
    uses = {GOOD + OLD: 100, BAD + YOUNG: 10}
    nothing = [0.0] * (CLASSES * AGES)
    for looks, together, trusted in ((1, 11.0, False), (2, 11.0, True), (2, 12.0, False), (3, 11.0, False)):
        trial = Trial()
        for _ in range(looks):
            look(trial, uses, 40, nothing)
        assert not trial.trusted
        trial.judge_early(worths(2.0, 1.0), WAITING, 40, together)
        assert trial.trusted == trusted


def test_worths_that_know_the_uses_must_be_ahead_by_a_hundredth_as_well() -> None:
    for lead, trusted in ((100, False), (102, True)):
        uses = {GOOD + YOUNG: 10_000, GOOD + OLD: lead}
        trial = Trial()
        for _ in range(2):
            look(trial, uses, 40, [0.0] * (CLASSES * AGES))
        trial.judge_early(worths(2.0, 1.0), WAITING, 40, 0.0)
        assert trial.trusted == trusted


def test_a_use_of_what_nobody_waits_for_any_more_needs_no_room() -> None:
    trial = looked({GOOD + 1: 5}, 10, worths(1.0, 1.0))
    assert trial._lru_hits == 5.0


def test_a_small_lead_is_not_enough_at_once() -> None:
    # A policy that is ahead by 3 % of LRU's hits at one look has a deviation as large as its lead.
    uses = {GOOD + YOUNG: 1_000, GOOD + OLD: 30}
    assert not looked(uses, 40, worths(2.0, 1.0)).trusted
    assert looked(uses | {GOOD + OLD: 40}, 40, worths(2.0, 1.0)).trusted
    trial = looked(uses, 40, worths(2.0, 1.0))
    look(trial, uses, 40, worths(2.0, 1.0))
    assert trial.trusted


def test_a_policy_that_decides_is_judged_by_the_hits_that_it_has() -> None:
    good = {GOOD + YOUNG: 100, GOOD + OLD: 1_000}
    trial = looked(good, 40, worths(2.0, 1.0))
    assert trial.trusted
    # It should have had 1,100 each time, and had none.
    looks = 0
    while trial.trusted:
        look(trial, good, 40, worths(2.0, 1.0))
        looks += 1
    assert 2 <= looks < 20
    # It is foreseen to be ahead again, and decides again once that outweighs what it lost.
    for _ in range(5):
        look(trial, good, 40, worths(2.0, 1.0))
    assert trial.trusted
