"""What the accuracy of K/V is told by, on distributions whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch

from bench.kv_scales import Outcome

EVEN = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]]).log()
SHARP = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]]).log()


def test_perplexity() -> None:
    """The geometric mean of 1 / 0.25 and 1 / 0.4."""
    assert Outcome(EVEN, torch.tensor([2, 3])).perplexity == pytest.approx(math.sqrt(10), rel=1e-6)


def test_divergence_is_from_the_truth() -> None:
    """The first row alone differs: 0.25 ln 2 either way, and half of that in the mean."""
    even, sharp = (Outcome(each, torch.tensor([2, 3])) for each in (EVEN, SHARP))
    assert sharp.divergence_from(even) == pytest.approx(0.25 * (-1 + 0 + 1 + 1) * math.log(2) / 2, rel=1e-5)
    assert even.divergence_from(sharp) == pytest.approx((0.5 - 0.25) * math.log(2) / 2, rel=1e-5)


def test_the_same_likeliest_token() -> None:
    other = Outcome(torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]).log(), torch.tensor([0, 0]))
    assert Outcome(SHARP, torch.tensor([0, 0])).same_top(other) == 0.5
