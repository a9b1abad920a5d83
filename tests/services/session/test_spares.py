"""How many spare blocks a runner wants, and whether it may ask late: cases by hand."""

from __future__ import annotations

from array import array

import pytest

from model_runner.request import Retention
from services.session.held import Held
from services.session.punctuality import ANSWERS, STEPS, Punctuality
from services.session.spares import SHORT_STEPS, Spares

SIZE = 16
LIMIT, USABLE = 16, 256


def spares() -> Spares:
    return Spares(LIMIT, USABLE, SIZE)


def held(handle: int, prompt: int, num_blocks: int) -> Held:
    return Held(
        str(handle), handle, "", Retention(), array("I", [7] * prompt), blocks=[0] * num_blocks, prompt_tokens=prompt
    )


@pytest.mark.parametrize(
    ("sequences", "wanted"), [(0, 4), (1, 4), (8, 4), (9, 5), (10, 5), (31, 16), (32, 16), (1000, LIMIT)]
)
def test_half_a_block_for_each_sequence_and_four_at_least(sequences: int, wanted: int) -> None:
    found = spares()
    found.step(sequences, 0, held_blocks=100, prompt=True)
    assert (found.wanted, found.is_thrifty) == (wanted, False)


@pytest.mark.parametrize(("held_blocks", "scarce"), [(USABLE - 4 * LIMIT, False), (USABLE - 4 * LIMIT + 1, True)])
def test_none_where_less_than_four_full_leases_are_left(held_blocks: int, scarce: bool) -> None:
    found = spares()
    found.step(20, 0, held_blocks, prompt=True)
    assert (found.is_thrifty, found.wanted) == (scarce, 0 if scarce else 10)


def test_answers_that_are_late_make_spare_blocks_worth_having_unless_somebody_waits_for_them() -> None:
    found = spares()
    found.step(20, 0, USABLE, prompt=False)
    assert (found.is_thrifty, found.wanted) == (False, 10)
    found.note_refusal()
    found.step(20, 0, USABLE, prompt=False)
    assert (found.is_thrifty, found.wanted) == (True, 0)


def test_none_for_a_while_after_a_refused_admission() -> None:
    found = spares()
    found.note_refusal()
    wanted = []
    for _ in range(SHORT_STEPS + 1):
        found.step(20, 0, held_blocks=100, prompt=True)
        wanted.append(found.wanted)
    assert wanted == [0] * (SHORT_STEPS - 1) + [10, 10]


@pytest.mark.parametrize(("held_blocks", "in_case"), [(100, 4), (250, 0)])
def test_what_cannot_be_foreseen_has_blocks_where_they_is_thrifty_too(held_blocks: int, in_case: int) -> None:
    found = spares()
    found.step(3, 2, held_blocks, prompt=True)
    assert (found.wanted, found.spoken_for) == (2 * 2 + in_case, 4)
    found.note_guess()
    found.step(3, 0, held_blocks, prompt=True)
    assert found.wanted == 2 + in_case
    found.step(3, 0, held_blocks, prompt=True)
    assert found.wanted == in_case, "guesses count for one step"


def test_a_prompt_that_ends_with_a_block_has_the_next_one_in_reach_until_it_is_computed() -> None:
    found = spares()
    prompts = [held(1, 32, 2), held(2, 33, 3), held(3, 48, 3)]
    for each in prompts:
        found.note_start(each)
    found.step(3, 0, held_blocks=250, prompt=True)
    assert found.wanted == 2
    prompts[0].computed = 32
    prompts[2].computed = 32
    found.step(3, 0, held_blocks=250, prompt=True)
    assert found.wanted == 1
    found.note_end(prompts[2])
    found.step(2, 0, held_blocks=250, prompt=True)
    assert found.wanted == 0


def test_more_than_the_limit_is_never_wanted() -> None:
    found = Spares(2, USABLE, SIZE)
    assert found.wanted == 2
    found.step(100, 50, held_blocks=0, prompt=True)
    assert found.wanted == 2


class TestPunctuality:
    @staticmethod
    def after(steps: list[float], answers: list[float]) -> bool:
        found, now = Punctuality(), 0.0
        found.note_step(now)
        for seconds in steps:
            now += seconds
            found.note_step(now)
        for seconds in answers:
            found.note_answer(seconds)
        return found.is_good

    def test_each_answer_within_each_step(self) -> None:
        assert self.after([0.02] * STEPS, [0.019])
        assert not self.after([0.02] * STEPS, [0.001, 0.021, 0.001])
        assert not self.after([0.02] * (STEPS - 1) + [0.004], [0.005])

    def test_nothing_is_known_yet(self) -> None:
        assert not self.after([0.02] * STEPS, [])
        assert not self.after([0.02] * (STEPS - 1), [0.001])

    def test_what_is_long_ago_does_not_count(self) -> None:
        assert self.after([0.001] + [0.02] * STEPS, [0.5] + [0.01] * ANSWERS)
        assert not self.after([0.02] * STEPS, [0.5] + [0.01] * (ANSWERS - 1))
