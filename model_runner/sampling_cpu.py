"""Sampling in numpy, row after row, where there are no kernels: a row's numbers stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.request import PositionLogprobs
from model_runner.sampling_rows import NO_TOKEN, SamplingRows
from model_runner.sampling_weights import LOG2_OF_E, WEIGHT_UNIT, log_of_sum, scales, weigh

# A nucleus is almost always this small; sorting a whole vocabulary for it costs several times as much.
_FIRST_LOOK = 1024
_NEXT_LOOK = 4
"""How many times as many tokens are looked at when those were too few."""
_STRETCH = 512
_ID_BITS = 31
_ID_MASK = (1 << _ID_BITS) - 1


def sample_by_rows(logits: Tensor, rows: SamplingRows) -> Tensor:
    """sample() of model_runner.sampling, of logits on a CPU."""
    array = logits.numpy()
    tokens = array.argmax(axis=1)
    possible = array[np.arange(len(array)), tokens] > -np.inf
    drawn = np.flatnonzero(possible & (rows.temperature > 0))
    for row, scale in zip(drawn.tolist(), scales(rows.temperature[drawn]).tolist(), strict=True):
        tokens[row] = draw(
            array[row],
            scale,
            int(rows.top_k[row]),
            float(rows.top_p[row]),
            float(rows.min_p[row]),
            float(rows.uniform[row]),
        )
    tokens[~possible] = NO_TOKEN
    return torch.from_numpy(tokens)


def logprobs_by_rows(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    """logprobs() of model_runner.sampling, of rows that all asked for some."""
    chosen = zip(logits.numpy(), token_ids.tolist(), counts, strict=True)
    return [_position(row, token, count) for row, token, count in chosen]


def draw(logits: NDArray[np.float32], scale: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    """The token that `uniform`, in [0, 1), stands for under logits [V], of which one is finite.

    scale: that of the temperature. What the filters do is said at model_runner.sampling.sample().
    """
    if 0 < top_k < len(logits):
        # What top_k leaves is a small vocabulary, in the order of ids.
        kept = np.sort(best(logits, top_k))
        return int(kept[draw(logits[kept], scale, 0, top_p, min_p, uniform)])
    weights = weigh(logits, scale)
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


def _position(logits: NDArray[np.float32], token_id: int, count: int) -> PositionLogprobs:
    norm = log_of_sum(float(logits.max()), int(weigh(logits, LOG2_OF_E).sum()))
    ids = best(logits, count)
    top = zip(ids.tolist(), (logits[ids].astype(np.float64) - norm).tolist(), strict=True)
    return PositionLogprobs(token_id, float(logits[token_id]) - norm, tuple(top))


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
