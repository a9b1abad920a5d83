"""Draws and log-probabilities of all rows in one call of the CPU kernels, over the library's threads."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, byref, c_float, c_int64, c_void_p, pointer
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.logit_edits import LogitEdits
from model_runner.native import NativeError, need_library
from model_runner.request import PositionLogprobs
from model_runner.sampling_rows import SamplingRows


class CEdits(Structure):
    """octavo_edits of octavo.h."""

    _fields_ = (
        ("repetition", c_float),
        ("frequency", c_float),
        ("presence", c_float),
        ("num_seen", c_int64),
        ("seen", c_void_p),
        ("counts", c_void_p),
        ("num_biased", c_int64),
        ("biased", c_void_p),
        ("biases", c_void_p),
        ("num_banned", c_int64),
        ("banned", c_void_p),
        ("mask", c_void_p),
    )


class CDraws(Structure):
    """octavo_draws of octavo.h."""

    _fields_ = (
        ("count", c_int64),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
        ("edits", c_void_p),
    )


class CPositions(Structure):
    """octavo_positions of octavo.h."""

    _fields_ = (
        ("count", c_int64),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("best", c_void_p),
        ("width", c_int64),
    )


def draw(
    logits: Tensor, rows: SamplingRows, edits: Sequence[LogitEdits | None] | None, source: Sequence[int] | None
) -> Tensor:
    """sample() of model_runner.sampling. Raises NativeError for a token id or a mask of another vocabulary."""
    logits = logits.contiguous()
    count, vocabulary = len(rows.temperature), logits.shape[1]
    places = _places(source, len(logits), count)
    tokens = torch.empty(count, dtype=torch.int64)
    changes = None if edits is None else _c_edits(edits, vocabulary)
    arrays = (places, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.uniform)
    draws = CDraws(
        count,
        vocabulary,
        logits.data_ptr(),
        *[torch.from_numpy(each).data_ptr() for each in arrays],
        None if changes is None else addressof(changes),
    )
    need_library().call("octavo_draw", byref(draws), tokens.data_ptr())
    return tokens


def logprobs(logits: Tensor, places: Tensor, token_ids: Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    """Log-probabilities of tokens [R] and of their counts [R] likeliest, in the rows `places` [R] of logits [S, V]."""
    logits = logits.contiguous()
    vocabulary = logits.shape[1]
    best = np.minimum(np.array(counts, dtype=np.int64), vocabulary)
    width = int(best.max(initial=0))
    chosen = np.empty(len(best))
    ids, values = np.empty((len(best), width), dtype=np.int64), np.empty((len(best), width))
    rows = _places(places.tolist(), len(logits), len(best))
    tokens = token_ids.contiguous()
    positions = CPositions(
        len(best),
        vocabulary,
        logits.data_ptr(),
        rows.ctypes.data,
        tokens.data_ptr(),
        best.ctypes.data,
        width,
    )
    outputs = (chosen.ctypes.data, ids.ctypes.data, values.ctypes.data)
    need_library().call("octavo_logprobs", byref(positions), *outputs)
    return [
        PositionLogprobs(token, logprob, tuple(zip(row_ids[:size], row_values[:size], strict=True)))
        for token, logprob, row_ids, row_values, size in zip(
            tokens.tolist(), chosen.tolist(), ids.tolist(), values.tolist(), best.tolist(), strict=True
        )
    ]


def _places(source: Sequence[int] | None, num_rows: int, count: int) -> NDArray[np.int64]:
    places = range(count) if source is None else source
    if len(places) != count or (count and not 0 <= min(places) <= max(places) < num_rows):
        raise NativeError(f"{count} rows are drawn from {len(places)} of {num_rows} rows of logits")
    return np.array(places, dtype=np.int64)


def _c_edits(edits: Sequence[LogitEdits | None], vocabulary: int) -> Array[Any]:
    """Addresses of the edits; the arrays and structures behind them live as long as what is returned."""
    pointers = (POINTER(CEdits) * len(edits))()
    for row, each in enumerate(edits):
        if each is not None:
            pointers[row] = pointer(_c_edit(each, vocabulary))
    return pointers


def _c_edit(edits: LogitEdits, vocabulary: int) -> CEdits:
    mask = edits.mask
    if mask is not None and len(mask) != -(-vocabulary // 32):
        raise NativeError(f"a mask of {len(mask)} words does not fit a vocabulary of {vocabulary} tokens")
    return CEdits(
        edits.repetition,
        edits.frequency,
        edits.presence,
        len(edits.seen),
        edits.seen.ctypes.data,
        edits.counts.ctypes.data,
        len(edits.biased),
        edits.biased.ctypes.data,
        edits.biases.ctypes.data,
        len(edits.banned),
        edits.banned.ctypes.data,
        None if mask is None else mask.ctypes.data,
    )
