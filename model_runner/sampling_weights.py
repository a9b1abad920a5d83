"""Probabilities as whole numbers, which add up to the same sum in any order, on any device and in any batch.

A token weighs 2^WEIGHT_BITS x e^((logit - largest) / temperature), to the nearest whole number, the even one of two.
Powers come from single sums and products in double precision, so that numpy, torch and the CPU kernels
(native/src/likelihood.h) get the same bits. A weight is within 1 and 1e-13 of itself of what it stands for. Sums fit 63
bits for vocabularies up to 2^19.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WEIGHT_BITS = 44
WEIGHT_UNIT = 2.0**WEIGHT_BITS
"""The weight of the likeliest token."""
LOG2_OF_E = 1.4426950408889634
LARGEST_SCALE = 1e300
"""Stands in for 1 / temperature where that is infinite."""
LEAST_POWER = -64.0
"""2 to this power, in units of 2^-WEIGHT_BITS, is 0."""
POWER_SERIES = (
    4.4455382718708116e-10,
    7.054911620801123e-09,
    1.01780860092397e-07,
    1.321548679014431e-06,
    1.5252733804059841e-05,
    0.0001540353039338161,
    0.0013333558146428443,
    0.009618129107628477,
    0.05550410866482158,
    0.24022650695910072,
    0.6931471805599453,
    1.0,
)
"""2^x for x from -0.5 to 0.5: the Taylor series ln(2)^n / n! x^n, its highest power first."""
_EXPONENT_BIAS, _EXPONENT_SHIFT = 1023, 52


def scales(temperature: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a difference of logits is multiplied by to become a power of 2: [R], from temperatures above 0, [R]."""
    with np.errstate(over="ignore"):
        return np.minimum(LOG2_OF_E / temperature, LARGEST_SCALE)


def weigh(logits: NDArray[np.float32], scale: float) -> NDArray[np.int64]:
    """The weights of one row: int64 [V], from logits [V] of which one is finite."""
    power = logits.astype(np.float64)
    power -= power.max()
    power *= scale
    np.maximum(power, LEAST_POWER, out=power)
    whole = np.rint(power)
    power -= whole
    weights = np.full_like(power, POWER_SERIES[0])
    for coefficient in POWER_SERIES[1:]:
        weights *= power
        weights += coefficient
    np.ldexp(weights, whole.astype(np.int32) + WEIGHT_BITS, out=weights)
    return np.rint(weights, out=weights).astype(np.int64)


def weigh_at_once(logits: Tensor, scale: Tensor) -> Tensor:
    """The weights of R rows: int64 [R, V], from logits [R, V] and float64 scales [R]; 0 for a row that is all -inf."""
    # Of infinities there is no difference; the least number stands in for the largest logit where that is -inf.
    most = logits.amax(dim=1, keepdim=True).clamp_(min=torch.finfo(logits.dtype).min)
    power = logits.to(torch.float64, copy=True).sub_(most.double()).mul_(scale.unsqueeze(1)).clamp_(min=LEAST_POWER)
    whole = power.round()
    power.sub_(whole)
    weights = torch.full_like(power, POWER_SERIES[0])
    for coefficient in POWER_SERIES[1:]:
        weights.mul_(power).add_(coefficient)
    unit = (whole.long().add_(WEIGHT_BITS + _EXPONENT_BIAS) << _EXPONENT_SHIFT).view(torch.float64)
    return weights.mul_(unit).round_().long()


def log_of_sum(most: float, weight: int) -> float:
    """ln of the sum of e^logit, from the largest logit and the sum of all weights at temperature 1."""
    return most + math.log(weight / WEIGHT_UNIT)
