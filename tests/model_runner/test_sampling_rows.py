"""The numbers that draws are made of: published SplitMix64 outputs, and the moments of a uniform distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.request import SamplingParams
from model_runner.sampling_rows import SamplingRows, splitmix64, uniforms

NUMBERS = 100_000
# Two-sided 0.001 quantile of the standard normal distribution.
NORMAL_0_001 = 3.291


def test_rows_refuse_lists_that_do_not_pair_up() -> None:
    with pytest.raises(ValueError, match="2 params, 1 seeds and 2 positions"):
        SamplingRows.of([SamplingParams()] * 2, [0], [0, 1])


def splitmix64_by_the_book(seed: int, count: int) -> list[int]:
    """SplitMix64 as S. Vigna's public-domain C source has it, a state that is stepped, in Python's own integers."""
    outputs, state, mask = [], seed, 2**64 - 1
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        outputs.append(mixed ^ (mixed >> 31))
    return outputs


# As published for this seed, among others by Rosetta Code, "Pseudo-random numbers/Splitmix64".
SPLITMIX_1234567 = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_splitmix64_gives_the_published_numbers() -> None:
    assert splitmix64_by_the_book(1234567, 5) == SPLITMIX_1234567
    outputs = splitmix64(np.full(5, 1234567, dtype=np.uint64), np.arange(5, dtype=np.uint64))
    assert outputs.tolist() == SPLITMIX_1234567


@given(st.integers(0, 2**64 - 1), st.integers(0, 300))
def test_splitmix64_is_the_sequence_entered_anywhere(seed: int, position: int) -> None:
    output = splitmix64(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.uint64))
    assert int(output[0]) == splitmix64_by_the_book(seed, position + 1)[-1]


@pytest.mark.parametrize("by", ["position", "seed"])
def test_uniforms_have_mean_a_half_and_variance_a_twelfth(by: str) -> None:
    counter, constant = np.arange(NUMBERS, dtype=np.uint64), np.full(NUMBERS, 11, dtype=np.uint64)
    values = uniforms(constant, counter) if by == "position" else uniforms(counter, constant)
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 1 / 2) < NORMAL_0_001 * math.sqrt(1 / 12 / NUMBERS)
    # The fourth central moment of a uniform is 1/80, so (x - 1/2)^2 has variance 1/80 - 1/144 = 1/180.
    assert abs(((values - 1 / 2) ** 2).mean() - 1 / 12) < NORMAL_0_001 * math.sqrt(1 / 180 / NUMBERS)


def test_where_nothing_is_drawn_no_number_is_made() -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=0.5)
    assert SamplingRows.of([greedy, greedy], [5, 1234567], [0, 1]).uniform.tolist() == [0.0, 0.0]
    mixed = SamplingRows.of([greedy, drawn], [5, 1234567], [0, 1]).uniform
    assert mixed[1] == (SPLITMIX_1234567[1] >> 11) * 2.0**-53
