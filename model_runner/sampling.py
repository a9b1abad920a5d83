"""How the next token of every sequence in a batch is chosen, and what log-probabilities are reported beside it.

On a CPU by the kernels (native/sampling.py), or without them by numpy, row after row (sampling_cpu.py); on another
device by torch, all rows at once (sampling_device.py). All three draw the same tokens from the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from model_runner import native
from model_runner.device_copies import to_device
from model_runner.logit_edits import LogitEdits, apply_edits
from model_runner.native import sampling as kernels
from model_runner.request import PositionLogprobs
from model_runner.sampling_cpu import logprobs_by_rows, sample_by_rows
from model_runner.sampling_device import Sampler, logprobs_at_once, sample_at_once
from model_runner.sampling_rows import SamplingRows

Edits = Sequence[LogitEdits | None]

_ROWS_AT_ONCE = 64
"""Of which log-probabilities are told; a row takes ten times its own memory meanwhile, and a prompt has many."""


def sample(
    logits: Tensor, rows: SamplingRows, edits: Edits | None = None, source: Sequence[int] | None = None
) -> Tensor:
    """One token id for each of R rows: int64 [R], on the device of `logits`, float32 [S, V], which are left unchanged.

    source: the row of `logits` that each draws from, [R]; by default S is R. edits: what becomes of each row's logits
    first, [R].

    Temperature 0 takes the largest logit, the lowest id among equals. Otherwise the token is drawn after the filters
    top_k, top_p and min_p, in this order; each works on what the one before left, renormalised, and where equally
    likely tokens compete for the last place, the lower id stays. The token is the first one, by id, at which the
    weights (sampling_weights.py) of those that are left add up to more than the share `uniform` of their sum. A logit
    of -inf is never drawn, and a row has no NaN or +inf. NO_TOKEN where all logits are -inf.
    """
    if logits.device.type == "cpu" and native.library() is not None:
        return kernels.draw(logits, rows, edits, source)
    if source is not None:
        logits = logits[to_device(torch.tensor(source, dtype=torch.int64), logits.device)]
    if edits is not None:
        logits = apply_edits(logits, edits)
    return sample_by_rows(logits, rows) if logits.device.type == "cpu" else sample_at_once(logits, rows)


def sample_ahead(logits: Tensor, rows: SamplingRows, source: Sequence[int], sampler: Sampler | None = None) -> Tensor:
    """sample() without edits, of which the device does all while the host goes on: nothing is read on the way.

    sampler: draws for the rows that it takes.
    """
    chosen = logits[to_device(torch.tensor(source, dtype=torch.int64), logits.device)]
    return sample_at_once(chosen, rows, may_wait=False, sampler=sampler)


def logprobs(
    logits: Tensor, token_ids: Tensor, top_n: Sequence[int | None], source: Sequence[int] | None = None
) -> list[PositionLogprobs | None]:
    """The chosen token's natural log-probability in each row and its top_n likeliest, from logits before any edit.

    logits: float32 [S, V]. token_ids: int64 [R]. top_n: None for a row that asked for nothing and gets None, else how
    many candidates (at most V come). source: the row of `logits` of each, [R]; by default S is R. Candidates are most
    likely first, equals by lower id.
    """
    asked = [index for index, count in enumerate(top_n) if count is not None]
    answers: list[PositionLogprobs | None] = [None] * len(top_n)
    if not asked:
        return answers
    places = torch.tensor(asked if source is None else [source[index] for index in asked])
    chosen = token_ids.cpu()[torch.tensor(asked)]
    counts = [top_n[index] or 0 for index in asked]
    for index, position in zip(asked, _positions(logits, places, chosen, counts), strict=True):
        answers[index] = position
    return answers


def _positions(logits: Tensor, places: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    """Log-probabilities of tokens [R] and their counts [R] likeliest, in the rows `places` [R] of logits."""
    if logits.device.type != "cpu":
        answers: list[PositionLogprobs] = []
        for first in range(0, len(counts), _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            answers += logprobs_at_once(logits[to_device(places[part], logits.device)], token_ids[part], counts[part])
        return answers
    if native.library() is not None:
        return kernels.logprobs(logits, places, token_ids, counts)
    return logprobs_by_rows(logits[places], token_ids, counts)
