"""Draws by FlashInfer's kernels, for rows whose requests have no seed: a draw that nobody can ask for again.

The kernels take random numbers of their own, of which the row's place in the batch decides too (curand_init(seed, row,
offset) in include/flashinfer/sampling.cuh), and add up in float32. So the same seed would not give the same token, and
rows with a seed are not theirs.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.device_copies import to_device
from model_runner.sampling_rows import SamplingRows

SEED_BITS = 62
_MOST_TEMPERATURE_RATIO = 1e30
"""Stands in for 1 / temperature where that would be too much for float32."""
_ROUNDING = 1e-4
"""Of a token's probability: how far float32 may be off when it says how many equal tokens a nucleus needs."""
_LEAST_SHARE = 1 - 1e-6
"""Of min_p, so that a token that has exactly this share is not lost to rounding."""


class FlashInferSampler:
    """A sampler for sample_at_once(). One thread uses it; the host waits for nothing.

    Rows with a top_k are not taken either: FlashInfer keeps all that equal the k-th token, which are more than k, and
    the k best of a row are found without sorting it anyway.
    """

    def __init__(self, api: Any = None, new_seed: Callable[[], int] | None = None) -> None:
        """api: stands in for the package. new_seed: of each call's random numbers, SEED_BITS bits; from the system."""
        self._api = api or importlib.import_module("flashinfer")
        self._new_seed = new_seed or (lambda: secrets.randbits(SEED_BITS))

    def takes(self, rows: SamplingRows, vocabulary: int) -> NDArray[np.bool_]:
        """Which rows it draws for, of those with a temperature: bool [R]."""
        return ~rows.is_seeded & ((rows.top_k <= 0) | (rows.top_k >= vocabulary))

    def draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Token ids, int64 [D], from logits, float32 [D, V], of rows that it takes. Any token where all are -inf."""
        drawn: Tensor = self._api.sampling_from_probs(self.left(logits, rows), seed=self._new_seed(), offset=0)
        return drawn.long()

    def left(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """The probabilities after temperature, top_p and min_p, in this order: float32 [D, V]."""
        probs = _softmax(logits, rows.temperature)
        narrowed = np.flatnonzero(rows.top_p < 1)
        if narrowed.size:
            index = _on(narrowed, logits)
            probs[index] = self._nucleus(probs[index], _on(rows.top_p[narrowed], logits).float())
        if rows.min_p.any():
            least = _on(rows.min_p * _LEAST_SHARE, logits).float().unsqueeze(1) * probs.amax(dim=1, keepdim=True)
            probs = _renormalised(probs.masked_fill_(probs < least, 0))
        return probs

    def _nucleus(self, probs: Tensor, top_p: Tensor) -> Tensor:
        """What top_p (float32 [F]) leaves of probs [F, V]. FlashInfer keeps all tokens that are as likely as the last
        one that is needed; of these the lower ids stay, as many as are needed."""
        kept = self._api.top_p_renorm_probs(probs, top_p) > 0
        last = probs.masked_fill(~kept, torch.inf).amin(dim=1, keepdim=True)
        above = probs > last
        mass = (probs * above).sum(dim=1, keepdim=True)
        needed = ((top_p.unsqueeze(1) - mass) / last - _ROUNDING).ceil().clamp(min=0)
        needed = torch.where(mass > 0, needed, needed.clamp(min=1))
        equal = probs == last
        return _renormalised(probs * (above | (equal & (equal.cumsum(dim=1) <= needed))))


def _softmax(logits: Tensor, temperature: NDArray[np.float64]) -> Tensor:
    """float32 [D, V]; equal probabilities in a row that is all -inf, for the kernels must not see NaN."""
    with np.errstate(over="ignore"):
        ratio = np.minimum(1 / temperature, _MOST_TEMPERATURE_RATIO)
    most = logits.amax(dim=1, keepdim=True)
    scaled = (logits - most.clamp(min=torch.finfo(logits.dtype).min)) * _on(ratio, logits).float().unsqueeze(1)
    return scaled.masked_fill_(most == -torch.inf, 0).softmax(dim=1)


def _renormalised(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=1, keepdim=True)


def _on(array: NDArray[np.float64] | NDArray[np.int64], like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(array), like.device)
