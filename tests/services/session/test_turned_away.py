"""Which tries of an admission are in vain for certain: cases by hand, in a pool of 10 blocks of 4 tokens."""

from __future__ import annotations

from array import array

import pytest

from model_runner.books import AllocationRequest
from model_runner.request import Retention
from services.session.held import Held
from services.session.turned_away import TRIES_IN_VAIN, TurnedAway

SIZE, USABLE = 4, 10


def refused(name: str = "a") -> TurnedAway:
    found = TurnedAway(USABLE, SIZE)
    found.note(name)
    return found


def request(tokens: int = 16, headroom: int = 0, **options) -> AllocationRequest:
    return AllocationRequest("a", range(tokens), headroom_blocks=headroom, **options)


def held(tokens: range, salt: str = "") -> Held:
    return Held("h", 1, salt, Retention(), array("I", tokens))


@pytest.mark.parametrize(
    ("tokens", "headroom", "held_blocks", "hopeless"),
    [(16, 0, 6, False), (16, 0, 7, True), (17, 0, 6, True), (16, 1, 5, False), (16, 1, 6, True)],
)
def test_what_it_needs_beside_what_is_not_held(tokens: int, headroom: int, held_blocks: int, hopeless: bool) -> None:
    assert refused().is_hopeless(request(tokens, headroom), [], held_blocks) is hopeless


def test_nobody_is_turned_away_unheard() -> None:
    assert not TurnedAway(USABLE, SIZE).is_hopeless(request(), [], USABLE)
    assert not refused("b").is_hopeless(request(), [], USABLE)


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (held(range(16)), 4),
        (held(range(9)), 2),
        (held(range(1, 17)), 0),
        (held(range(16), "salt"), 0),
        (Held("h", 1, "", Retention(), array("I", [0, 1, 2, 3, 9, 5, 6, 7, 8])), 1),
    ],
)
def test_what_others_hold_of_its_prompt_costs_nothing(other: Held, shared: int) -> None:
    # Four blocks, less those that are shared, fit beside 6 and as many as are shared.
    assert not refused().is_hopeless(request(), [held(range(50, 60)), other], 6 + shared)
    assert refused().is_hopeless(request(), [other, held(range(50, 60))], 7 + shared)
    assert refused().is_hopeless(request(skip_cache_read=True), [other], 7)


def test_now_and_then_it_is_asked_for_all_the_same() -> None:
    away = refused()
    tries = [away.is_hopeless(request(), [], USABLE) for _ in range(TRIES_IN_VAIN + 2)]
    assert tries == [True] * TRIES_IN_VAIN + [False, False]
    away.note("a")
    assert away.is_hopeless(request(), [], USABLE)
