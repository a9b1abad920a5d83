"""How the next token of every sequence in a batch is chosen, and what log-probabilities are reported beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.request import PositionLogprobs, SamplingParams
from model_runner.sampling_cpu import best, draw, log_sum_exp

# Probabilities become integers, in units of 2^-44 of the likeliest token's. Integers add up to the same sum in any
# order, so no reduction on any device can make a draw depend on the shape of the batch. Sums fit 63 bits for
# vocabularies below 2^19.
_WEIGHT_BITS = 44
_ID_BITS = 31
_ID_MASK = (1 << _ID_BITS) - 1
# A nucleus is almost always this small; sorting a whole vocabulary for it costs a CPU ten times as much.
_FIRST_LOOK = 1024

_SPLITMIX_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """What sample() needs to know of each of R rows, on the host: arrays of shape [R].

    temperature, top_p, min_p and uniform are float64, top_k is int64; uniform lies in [0, 1). The neutral values are
    those of SamplingParams.
    """

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniform: NDArray[np.float64]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]) -> SamplingRows:
        """Rows from valid parameters. seeds are 0..2^64-1 and positions >= 0; `SamplingParams.seed` is not read.

        Raises ValueError when the three differ in length, OverflowError for a seed or position out of range.
        """
        if not len(params) == len(seeds) == len(positions):
            raise ValueError(f"{len(params)} params, {len(seeds)} seeds and {len(positions)} positions do not pair up")
        return cls(
            temperature=np.array([each.temperature for each in params], dtype=np.float64),
            top_k=np.array([each.top_k for each in params], dtype=np.int64),
            top_p=np.array([each.top_p for each in params], dtype=np.float64),
            min_p=np.array([each.min_p for each in params], dtype=np.float64),
            uniform=uniforms(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)),
        )

    def take(self, index: NDArray[np.int64]) -> SamplingRows:
        """The rows at `index`, int64 [D], in that order."""
        return SamplingRows(
            self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index], self.uniform[index]
        )


def splitmix64(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Output number `position` (from 0) of the SplitMix64 generator started with `seed`; uint64 [R] each."""
    state = seeds + (positions + np.uint64(1)) * _SPLITMIX_GAMMA
    state = (state ^ (state >> np.uint64(30))) * _SPLITMIX_MULTIPLIERS[0]
    state = (state ^ (state >> np.uint64(27))) * _SPLITMIX_MULTIPLIERS[1]
    output: NDArray[np.uint64] = state ^ (state >> np.uint64(31))
    return output


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Multiples of 2^-53 in [0, 1), float64 [R], each a function of its seed and position (uint64 [R]) alone."""
    return (splitmix64(seeds, positions) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """One token id for each row: int64 [R], on the device of `logits`, which are float32 [R, V] and left unchanged.

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the token is drawn after the filters
    top_k, top_p and min_p, in this order; each works on what the one before left, renormalised, and where equally
    likely tokens compete for the last place, the lower id stays. A logit of -inf is never drawn; a row needs one
    finite logit and no NaN or +inf.
    """
    return sample_by_rows(logits, rows) if logits.device.type == "cpu" else sample_at_once(logits, rows)


def sample_by_rows(logits: Tensor, rows: SamplingRows) -> Tensor:
    """sample() for a CPU."""
    array = logits.numpy()
    tokens = array.argmax(axis=1)
    for row in np.flatnonzero(rows.temperature > 0).tolist():
        tokens[row] = draw(
            array[row],
            float(rows.temperature[row]),
            int(rows.top_k[row]),
            float(rows.top_p[row]),
            float(rows.min_p[row]),
            float(rows.uniform[row]),
        )
    return torch.from_numpy(tokens)


def sample_at_once(logits: Tensor, rows: SamplingRows) -> Tensor:
    """sample() for a device that likes large tensors."""
    drawn = np.flatnonzero(rows.temperature > 0)
    if drawn.size == 0:
        return logits.argmax(dim=-1)
    if drawn.size == logits.shape[0]:
        return _draw(logits, rows)
    tokens = logits.argmax(dim=-1)
    index = _to_device(drawn, logits)
    tokens[index] = _draw(logits[index], rows.take(drawn))
    return tokens


def logprobs(logits: Tensor, token_ids: Tensor, top_n: Sequence[int | None]) -> list[PositionLogprobs | None]:
    """The chosen token's natural log-probability in each row and its top_n likeliest, from logits before any filter.

    logits: float32 [R, V]. token_ids: int64 [R]. top_n: None for a row that asked for nothing and gets None, else how
    many candidates (at most V come). Candidates are most likely first, equals by lower id.
    """
    if logits.device.type != "cpu":
        return logprobs_at_once(logits, token_ids, top_n)
    chosen = zip(logits.numpy(), token_ids.tolist(), top_n, strict=True)
    return [None if count is None else _position(row, token, count) for row, token, count in chosen]


def _position(logits: NDArray[np.float32], token_id: int, count: int) -> PositionLogprobs:
    norm = log_sum_exp(logits)
    ids = best(logits, count)
    top = zip(ids.tolist(), (logits[ids].astype(np.float64) - norm).tolist(), strict=True)
    return PositionLogprobs(token_id, float(logits[token_id]) - norm, tuple(top))


def logprobs_at_once(logits: Tensor, token_ids: Tensor, top_n: Sequence[int | None]) -> list[PositionLogprobs | None]:
    """logprobs() for a device that likes large tensors."""
    asked = [row for row, count in enumerate(top_n) if count is not None]
    answers: list[PositionLogprobs | None] = [None] * len(top_n)
    if not asked:
        return answers
    if len(asked) < len(top_n):
        index = torch.tensor(asked, device=logits.device)
        logits, token_ids = logits[index], token_ids.to(logits.device)[index]
    counts = [top_n[row] or 0 for row in asked]
    chosen, top_ids, top_values = _log_softmax_at(logits, token_ids.to(logits.device), max(counts))
    for place, (row, count) in enumerate(zip(asked, counts, strict=True)):
        token, value = chosen[place]
        top = tuple(zip(top_ids[place][:count], top_values[place][:count], strict=True))
        answers[row] = PositionLogprobs(int(token), value, top)
    return answers


def _log_softmax_at(
    logits: Tensor, token_ids: Tensor, width: int
) -> tuple[list[tuple[int, float]], list[list[int]], list[list[float]]]:
    """On the host: (id, log-probability) of `token_ids`, then ids and log-probabilities of each row's `width` best."""
    norm = logits.double().logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)).double() - norm
    pairs = list(zip(token_ids.tolist(), chosen.squeeze(1).tolist(), strict=True))
    if width == 0:
        return pairs, [[]] * len(pairs), [[]] * len(pairs)
    top_ids = _ids_of(_ranks(logits).topk(min(width, logits.shape[1])).values)
    return pairs, top_ids.tolist(), (logits.gather(1, top_ids).double() - norm).tolist()


def _draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Inverse-CDF draws, int64 [D], from logits [D, V] whose rows all have temperature > 0."""
    weights = _weights(logits, _to_device(rows.temperature, logits))
    _filter_top(weights, logits, rows)
    if rows.min_p.any():
        _filter_min_p(weights, _to_device(rows.min_p, logits))
    mass = weights.cumsum(dim=1)
    total = mass[:, -1:]
    target = (_to_device(rows.uniform, logits).unsqueeze(1) * total.double()).long()
    # The product may round up to the total itself, which lies beyond the last token.
    target = target.minimum(total - 1)
    return torch.searchsorted(mass, target, right=True).squeeze(1)


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities, int64 [D, V]: 2^44 for a row's likeliest token."""
    scaled = logits.to(torch.float64, copy=True).sub_(logits.amax(dim=1, keepdim=True))
    return scaled.div_(temperature.unsqueeze(1)).exp_().mul_(2.0**_WEIGHT_BITS).long()


def _filter_min_p(weights: Tensor, min_p: Tensor) -> None:
    """Zeroes, in place, what is less likely than min_p (float64 [D]) times the likeliest token, which always stays."""
    least = (min_p * 2.0**_WEIGHT_BITS).ceil().long()
    weights.masked_fill_(weights < least.unsqueeze(1), 0)


def _filter_top(weights: Tensor, logits: Tensor, rows: SamplingRows) -> None:
    """Zeroes, in place, what top_k and then top_p leave out; touches only the rows that have either."""
    vocabulary = weights.shape[1]
    top_k = np.where((rows.top_k <= 0) | (rows.top_k > vocabulary), vocabulary, rows.top_k)
    filtered = np.flatnonzero((top_k < vocabulary) | (rows.top_p < 1))
    if filtered.size == 0:
        return
    index = _to_device(filtered, weights)
    ranks, chosen = _ranks(logits[index]), weights[index]
    last = _last_kept(ranks, chosen, top_k[filtered], rows.top_p[filtered])
    weights[index] = chosen.masked_fill_(ranks < last, 0)


def _last_kept(ranks: Tensor, weights: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> Tensor:
    """The rank, int64 [F, 1], of the least likely token that top_k (1..V) and top_p leave in each row."""
    vocabulary = weights.shape[1]
    # Without a top_k, the nucleus may turn out to be larger than the first look.
    unbounded = bool((top_k == vocabulary).any())
    width = max(int(top_k[top_k < vocabulary].max(initial=1)), _FIRST_LOOK if unbounded else 1)
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
    return torch.from_numpy(array).to(like.device)
