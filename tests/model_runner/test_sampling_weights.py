"""Weights beside Python's own exp, in numpy and in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from model_runner.sampling_weights import (
    LOG2_OF_E,
    POWER_SERIES,
    WEIGHT_UNIT,
    log_of_sum,
    scales,
    weigh,
    weigh_at_once,
)


def test_weights_are_powers_of_e_in_units() -> None:
    """To one unit and 1e-13, by Python's own exp; halves of a power of 2, where the series ends, are among them."""
    differences = [0.0, *(-0.5 * n * math.log(2) for n in range(1, 100)), *(-(1.37**n) / 1000 for n in range(30))]
    logits = np.array(differences, dtype=np.float32)
    for temperature in (0.01, 0.7, 1.0, 100.0):
        scale = scales(np.array([temperature]))
        weights = weigh(logits, scale[0])
        assert weights[0] == 2**44
        for logit, weight in zip(logits.tolist(), weights.tolist(), strict=True):
            exact = math.exp(logit / temperature) * 2**44
            assert abs(weight - exact) <= 1 + 1e-13 * exact
        assert weigh_at_once(torch.from_numpy(logits)[None], torch.from_numpy(scale)).tolist() == [weights.tolist()]


def test_the_series_is_taylors() -> None:
    expected = [math.log(2) ** n / math.factorial(n) for n in range(len(POWER_SERIES))]
    assert POWER_SERIES[::-1] == pytest.approx(expected, rel=1e-15)
    assert pytest.approx(1 / math.log(2), rel=1e-15) == LOG2_OF_E
    assert WEIGHT_UNIT == 2**44


def test_the_log_of_a_sum_is_that_of_the_powers() -> None:
    logits = np.array([3.0, -2.0, 10.5, 10.25], dtype=np.float32)
    expected = math.log(math.fsum(map(math.exp, logits.tolist())))
    assert log_of_sum(10.5, int(weigh(logits, LOG2_OF_E).sum())) == pytest.approx(expected, abs=1e-12)


def test_a_row_without_a_finite_logit_weighs_nothing_on_a_device() -> None:
    logits = torch.tensor([[-math.inf, -math.inf], [0.0, -math.inf]])
    weights = weigh_at_once(logits, torch.tensor([1.0, 1.0], dtype=torch.float64))
    assert weights.tolist() == [[0, 0], [2**44, 0]]
