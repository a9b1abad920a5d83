"""Sampling in torch, all rows at once, for a device that likes large tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.device_copies import to_device
from model_runner.request import PositionLogprobs
from model_runner.sampling_rows import NO_TOKEN, SamplingRows
from model_runner.sampling_weights import LOG2_OF_E, WEIGHT_UNIT, log_of_sum, scales, weigh_at_once

_ID_BITS = 31
_ID_MASK = (1 << _ID_BITS) - 1
# A nucleus is almost always this small; sorting a whole vocabulary for it costs several times as much.
_FIRST_LOOK = 1024


class Sampler(Protocol):
    """Draws from the same distributions in a way of its own, for rows that need not be drawn for as sample() does."""

    def takes(self, rows: SamplingRows, vocabulary: int) -> NDArray[np.bool_]:
        """Which rows it draws for, of those with a temperature: bool [R]."""
        ...

    def draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Token ids, int64 [D], from logits, float32 [D, V], of rows that it takes. Any token where all are -inf."""
        ...


def sample_at_once(
    logits: Tensor, rows: SamplingRows, *, may_wait: bool = True, sampler: Sampler | None = None
) -> Tensor:
    """sample() of model_runner.sampling, on any device.

    may_wait: the host may read on the way whether a nucleus is small, which spares the sorting of whole rows. sampler:
    draws for the rows that it takes.
    """
    tokens = logits.argmax(dim=-1)
    impossible = logits.gather(1, tokens.unsqueeze(1)).squeeze(1) == -torch.inf
    drawn = rows.temperature > 0
    if sampler is not None:
        taken = drawn & sampler.takes(rows, logits.shape[1])
        drawn &= ~taken
        tokens = _replaced(tokens, logits, rows, taken, sampler.draw)
    tokens = _replaced(tokens, logits, rows, drawn, lambda some, of_some: _draw(some, of_some, may_wait))
    return tokens.masked_fill_(impossible, NO_TOKEN)


def logprobs_at_once(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    """logprobs() of model_runner.sampling, of rows that all asked for some, on any device."""
    if not counts:
        return []
    measured = measure(logits, to_device(token_ids, logits.device), max(counts))
    return positions_of(token_ids.tolist(), measured, counts)


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """What log-probabilities of A rows are made of: the largest logit and the sum of all weights, the chosen logit
    ([A] each), and the ids and logits of the W likeliest tokens, [A, W], likeliest first."""

    most: Tensor
    sums: Tensor
    chosen: Tensor
    top_ids: Tensor
    top_logits: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.most, self.sums, self.chosen, self.top_ids, self.top_logits


def measure(logits: Tensor, token_ids: Tensor, width: int) -> MeasuredRows:
    """Measures of the rows of logits, [A, V], for the tokens chosen there, [A], both on one device; reads nothing."""
    ones = torch.full((len(logits),), LOG2_OF_E, dtype=torch.float64, device=logits.device)
    top_ids = _ids_of(_ranks(logits).topk(min(width, logits.shape[1])).values)
    return MeasuredRows(
        most=logits.amax(dim=1),
        sums=weigh_at_once(logits, ones).sum(dim=1),
        chosen=logits.gather(1, token_ids.unsqueeze(1)).squeeze(1),
        top_ids=top_ids,
        top_logits=logits.gather(1, top_ids),
    )


def positions_of(token_ids: Sequence[int], measured: MeasuredRows, counts: Sequence[int]) -> list[PositionLogprobs]:
    """The log-probabilities of tokens [A] and of their counts [A] likeliest."""
    most, sums, chosen, top_ids, top_logits = (tensor.tolist() for tensor in measured.tensors)
    answers: list[PositionLogprobs] = []
    for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True)):
        # A logarithm's last bit is a matter of the device.
        norm = log_of_sum(most[row], sums[row])
        values = [logit - norm for logit in top_logits[row][:count]]
        top = tuple(zip(top_ids[row][:count], values, strict=True))
        answers.append(PositionLogprobs(token_id, chosen[row] - norm, top))
    return answers


def _replaced(
    tokens: Tensor,
    logits: Tensor,
    rows: SamplingRows,
    some: NDArray[np.bool_],
    draw: Callable[[Tensor, SamplingRows], Tensor],
) -> Tensor:
    """The tokens [R] with draws in place of some; may write to the tokens given."""
    places = np.flatnonzero(some)
    if places.size == len(tokens):
        return draw(logits, rows)
    if places.size:
        index = _to_device(places, logits)
        tokens[index] = draw(logits[index], rows.take(places))
    return tokens


def _draw(logits: Tensor, rows: SamplingRows, may_wait: bool) -> Tensor:
    """Inverse-CDF draws, int64 [D], from logits [D, V] whose rows all have temperature > 0."""
    mass = weights_left(logits, rows, may_wait=may_wait).cumsum(dim=1)
    total = mass[:, -1:]
    target = (_to_device(rows.uniform, logits).unsqueeze(1) * total.double()).long()
    # The product may round up to the total itself, which lies beyond the last token.
    target = target.minimum(total - 1)
    return torch.searchsorted(mass, target, right=True).squeeze(1)


def weights_left(logits: Tensor, rows: SamplingRows, *, may_wait: bool = True) -> Tensor:
    """The weights that the filters leave, int64 [D, V], of logits [D, V] whose rows all have temperature > 0."""
    weights = weigh_at_once(logits, _to_device(scales(rows.temperature), logits))
    _filter_top(weights, logits, rows, may_wait)
    if rows.min_p.any():
        _filter_min_p(weights, _to_device(rows.min_p, logits))
    return weights


def _filter_min_p(weights: Tensor, min_p: Tensor) -> None:
    """Zeroes, in place, what is less likely than min_p (float64 [D]) times the likeliest token, which always stays."""
    least = (min_p * WEIGHT_UNIT).ceil().long()
    weights.masked_fill_(weights < least.unsqueeze(1), 0)


def _filter_top(weights: Tensor, logits: Tensor, rows: SamplingRows, may_wait: bool) -> None:
    """Zeroes, in place, what top_k and then top_p leave out; touches only the rows that have either."""
    vocabulary = weights.shape[1]
    top_k = np.where((rows.top_k <= 0) | (rows.top_k > vocabulary), vocabulary, rows.top_k)
    filtered = np.flatnonzero((top_k < vocabulary) | (rows.top_p < 1))
    if filtered.size == 0:
        return
    index = _to_device(filtered, weights)
    ranks, chosen = _ranks(logits[index]), weights[index]
    last = _last_kept(ranks, chosen, top_k[filtered], rows.top_p[filtered], may_wait)
    weights[index] = chosen.masked_fill_(ranks < last, 0)


def _last_kept(
    ranks: Tensor, weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64], may_wait: bool
) -> Tensor:
    """The rank, int64 [F, 1], of the least likely token that top_k (1..V) and top_p leave in each row."""
    vocabulary = weights.shape[1]
    # Without a top_k, the nucleus may turn out to be larger than the first look.
    unbounded = bool((top_k == vocabulary).any())
    look = _FIRST_LOOK if may_wait else vocabulary
    width = max(int(top_k[top_k < vocabulary].max(initial=1)), look if unbounded else 1)
    width = min(width, vocabulary)
    k, p = _to_device(top_k, weights).unsqueeze(1), _to_device(top_p, weights).unsqueeze(1)
    best, kept, enough = _nucleus(ranks, weights, k, p, width)
    if unbounded and width < vocabulary and not bool(enough.all()):
        best, kept, _ = _nucleus(ranks, weights, k, p, vocabulary)
    return best.gather(1, kept - 1)


def _nucleus(ranks: Tensor, weights: Tensor, k: Tensor, p: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Looks at each row's `width` best tokens: ranks [F, width], how many stay [F, 1], and if that is all [F, 1]."""
    best = ranks.topk(width).values
    each = weights.gather(1, _ids_of(best))
    mass = each.cumsum(dim=1)
    within_k = mass.gather(1, k.clamp(max=width) - 1)
    total = torch.where(k > width, weights.sum(dim=1, keepdim=True), within_k)
    needed = torch.where(p < 1, (p * total.double()).ceil().long(), total).minimum(total)
    # A token stays while those before it have not reached the needed mass, so the first one always does.
    kept = (mass - each < needed).sum(dim=1, keepdim=True).clamp(min=1)
    return best, kept, (k <= width) | (mass[:, -1:] >= needed)


def _ranks(logits: Tensor) -> Tensor:
    """int64 [R, V] that sorts as the logits do and, among equal ones, has the lower token id on top; all distinct."""
    # Adding 0.0 turns -0.0, whose bits differ, into 0.0. Negative floats sort backwards as integers until flipped.
    bits = (logits.float() + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << _ID_BITS) + (_ID_MASK - ids)


def _ids_of(ranks: Tensor) -> Tensor:
    """The token ids that _ranks put into its numbers."""
    return _ID_MASK - (ranks & _ID_MASK)


def _to_device(array: NDArray[np.float64] | NDArray[np.int64], like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(array), like.device)
