"""What the model learns from counted lives: worths by their definition, and evidence by prompts, not by blocks."""

import random

import pytest

from kvmanager.return_model import AGES, CLASSES, ReturnModel, age_bucket, class_of

UNIT = 5


def learned(size: int, prompts: int = 400, seed: int = 1) -> ReturnModel:
    """A model after prompts of `size` blocks: a third come back after a second turn, a tenth after a first."""
    rng = random.Random(seed)
    model = ReturnModel(UNIT)
    for _ in range(prompts):
        turn = rng.choice((1, 2))
        cell = class_of(turn, rng.choice((4, 20, 50)), 5, 0) * AGES + rng.randrange(2, 12)
        if rng.random() < (0.1 if turn == 1 else 0.33):
            model.count_returned(cell, size)
        else:
            model.gone[cell] += size
        model.settle()
    for _ in range(5):
        model.learn({})
    return model


def naive_worth(odds: float, hazards: list[float]) -> list[float]:
    """The most uses per block and time over all times to keep a block, from each age on."""
    starts = [next(unit for unit in range(1 << 20) if age_bucket(unit) == age) * UNIT for age in range(AGES)]
    starts.append(2 * starts[AGES - 2])
    chance, rest = odds / (1 + odds), 1.0
    room, uses = [0.0], [0.0]
    for age, hazard in enumerate(hazards):
        kept = 1 - chance + chance * rest * (1 - hazard / 2)
        room.append(room[-1] + kept * (starts[age + 1] - starts[age]))
        uses.append(uses[-1] + chance * rest * hazard)
        rest *= 1 - hazard
    return [
        max((uses[end] - uses[age]) / (room[end] - room[age]) for end in range(age + 1, AGES + 1))
        for age in range(AGES)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_worth_is_the_best_ratio_of_uses_to_room_to_a_quarter_octave(seed: int) -> None:
    rng = random.Random(seed)
    hazards = [rng.choice((0.0, 0.5 * rng.random())) for _ in range(AGES)]
    left = [1.0]
    for hazard in hazards:
        left.append(left[-1] * (1 - hazard))
    curve = (left[:-1], [before * hazard for before, hazard in zip(left, hazards, strict=False)])
    odds = 2.0 ** rng.uniform(-9, 6)
    for got, want in zip(ReturnModel(UNIT)._worth_of(odds, curve), naive_worth(odds, hazards), strict=True):
        assert 0.91 * want <= got <= 1.1 * want


def test_blocks_that_come_back_together_are_one_piece_of_evidence() -> None:
    assert learned(size=40).worth == learned(size=1).worth


def test_prompts_that_count_nothing_are_no_evidence() -> None:
    model, idle = learned(size=3), learned(size=3)
    for _ in range(1_000):
        idle.settle()
    model.learn({})
    idle.learn({})
    assert model.worth == idle.worth


def test_a_later_turn_is_worth_what_it_comes_back_more() -> None:
    worth = learned(size=8, prompts=4_000).worth
    first, second = (worth[class_of(turn, 20, 5, 0) * AGES + 2] for turn in (1, 2))
    assert 2.5 < second / first < 6


def test_what_was_never_seen_is_worth_something() -> None:
    assert min(learned(size=8).worth[number * AGES] for number in range(CLASSES)) > 0
