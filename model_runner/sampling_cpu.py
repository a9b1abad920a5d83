"""Sampling on a CPU, row after row: a row's numbers stay in the cache, and no thread waits for another.

The arithmetic is that of model_runner.sampling, which works on all rows at once, as devices like it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

WEIGHT_UNIT = 2.0**44
# A nucleus is almost always this small; sorting a whole vocabulary for it costs several times as much.
_FIRST_LOOK = 1024
_NEXT_LOOK = 4
"""How many times as many tokens are looked at when those were too few."""
_STRETCH = 512
_ID_BITS = 31
_ID_MASK = (1 << _ID_BITS) - 1


def draw(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The token that `uniform`, in [0, 1), stands for under logits [V]; temperature is above 0.

    What the filters do is said at model_runner.sampling.sample().
    """
    if 0 < top_k < len(logits):
        # What top_k leaves is a small vocabulary, in the order of ids.
        kept = np.sort(best(logits, top_k))
        return int(kept[draw(logits[kept], temperature, 0, top_p, min_p, uniform)])
    weights = _weights(logits, temperature)
    if top_p >= 1:
        return _invert(_without_the_unlikely(weights, min_p), uniform)
    kept = _nucleus(logits, weights, top_p)
    return int(kept[_invert(_without_the_unlikely(weights[kept], min_p), uniform)])


def best(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The ids of the `count` largest of logits [V] (all, when there are fewer), largest first, equals by lower id."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    ids = np.arange(len(logits))
    if count < len(logits):
        ids = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    ranks = np.sort(_ranks(logits[ids], ids))[::-1]
    return _ID_MASK - (ranks[:count] & _ID_MASK)


def log_sum_exp(logits: NDArray[np.float32]) -> float:
    """ln of the sum of e^logit, in double precision."""
    most = float(logits.max())
    return most + math.log(np.exp(logits.astype(np.float64) - most).sum())


def _weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.int64]:
    """Unnormalised probabilities, [V]: 2^44 for the likeliest token."""
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):
        scaled /= temperature
    np.exp(scaled, out=scaled)
    scaled *= WEIGHT_UNIT
    return scaled.astype(np.int64)


def _ranks(logits: NDArray[np.float32], ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers that sort as the logits do and, among equal ones, have the lower id on top: integers sort fastest."""
    # Adding 0.0 turns -0.0, whose bits differ, into 0.0. Negative floats sort backwards as integers until flipped.
    bits = (logits + np.float32(0)).view(np.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.astype(np.int64) << _ID_BITS) + (_ID_MASK - ids)


def _nucleus(logits: NDArray[np.float32], weights: NDArray[np.int64], top_p: float) -> NDArray[np.int64]:
    """The ids that top_p, below 1, leaves; ascending."""
    total = int(weights.sum())
    needed = min(math.ceil(top_p * total), total)
    count = _FIRST_LOOK
    ids = best(logits, count)
    while weights[ids].sum() < needed:
        count *= _NEXT_LOOK
        ids = best(logits, count)
    each = weights[ids]
    # A token stays while those before it have not reached the needed mass, so the first one always does.
    kept = max(1, int(np.searchsorted(each.cumsum() - each, needed)))
    return np.sort(ids[:kept])


def _without_the_unlikely(weights: NDArray[np.int64], min_p: float) -> NDArray[np.int64]:
    """Zeroes, in place, what is less likely than min_p times the likeliest token, which always stays."""
    if min_p:
        weights[weights < math.ceil(min_p * WEIGHT_UNIT)] = 0
    return weights


def _invert(weights: NDArray[np.int64], uniform: float) -> int:
    """The first place where the cumulated weights exceed the share `uniform` of their sum."""
    # Stretch by stretch: a running sum costs much more than a sum.
    stretches = np.add.reduceat(weights, np.arange(0, len(weights), _STRETCH)).cumsum()
    total = int(stretches[-1])
    # The product may round up to the total itself, which lies beyond the last token.
    target = min(int(uniform * total), total - 1)
    stretch = int(np.searchsorted(stretches, target, side="right"))
    first = stretch * _STRETCH
    before = int(stretches[stretch - 1]) if stretch else 0
    return first + int(np.searchsorted(weights[first : first + _STRETCH].cumsum(), target - before, side="right"))
