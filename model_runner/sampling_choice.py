"""Who draws on a GPU for requests without a seed: FlashInfer, where it is there and right, or we ourselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.request import SamplingParams
from model_runner.sampling_device import Sampler, weights_left
from model_runner.sampling_flashinfer import FlashInferSampler
from model_runner.sampling_rows import SamplingRows

_LONGEST_REASON = 200
_OFF = 1e-3
"""Of the probability of a row: how much float32 may put elsewhere than whole numbers do."""
_SPREAD = (0.5, 2.0, 6.0)
"""Standard deviations of the logits of the trial's rows."""
_ASKED = [
    SamplingParams(temperature, top_p=top_p, min_p=min_p)
    for temperature in (0.6, 1.0, 1.7)
    for top_p in (1.0, 0.95, 0.5)
    for min_p in (0.0, 0.05)
]
_LIKELY = (0.4, 0.25, 0.15, 0.1, 0.06, 0.04)
"""Probabilities of the tokens that the trial draws again and again."""
_ROWS, _TURNS = 128, 32
_MOST_CHI_SQUARE = 60.0
"""Five degrees of freedom exceed it once in 10^11 times."""


@dataclass(frozen=True, slots=True)
class SamplerChoice:
    """sampler: None for our own draws alone. line: what a start says of it."""

    sampler: Sampler | None
    line: str


def choose_sampler(
    device: torch.device, vocabulary: int, make: Callable[[], FlashInferSampler] = FlashInferSampler
) -> SamplerChoice:
    """FlashInfer's kernels if they can be had and pass a trial, which compiles them: that can take a minute."""
    reason = FlashInferAttention.why_not_here(device)
    if reason is None:
        try:
            sampler = make()
            reason = why_wrong(sampler, device, vocabulary)
        # Compilers, loaders and kernels fail in ways of their own, and all of them mean the same here.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            reason = f"its trial failed: {type(error).__name__}: {lines[0][:_LONGEST_REASON]}"
        if reason is None:
            return SamplerChoice(sampler, "flashinfer for requests with neither seed nor top_k; else octavo's own")
    return SamplerChoice(None, f"octavo's own (not flashinfer: {reason})")


@torch.inference_mode()
def why_wrong(sampler: FlashInferSampler, device: torch.device, vocabulary: int) -> str | None:
    """What a sampler does wrong, in a phrase; None when nothing. Raises what its kernels raise."""
    off = max(_share_elsewhere(sampler, device, vocabulary, spread) for spread in _SPREAD)
    # A NaN is not within any bound.
    if not off <= _OFF:
        return f"its trial gave probabilities of which {off:.3g} are elsewhere"
    return _what_is_odd(sampler, device, vocabulary)


def _share_elsewhere(sampler: FlashInferSampler, device: torch.device, vocabulary: int, spread: float) -> float:
    """The most, over rows, of what it leaves elsewhere than our own filters do: half the sum of differences."""
    draw = torch.Generator().manual_seed(vocabulary)
    # As coarse as logits in bfloat16 are, so that many are equal.
    logits = torch.randn(len(_ASKED), vocabulary, generator=draw).mul(spread).bfloat16().float().to(device)
    rows = _rows(_ASKED)
    weights = weights_left(logits, rows).double()
    exact = weights / weights.sum(dim=1, keepdim=True)
    return float((sampler.left(logits, rows).double() - exact).abs().sum(dim=1).max() / 2)


def _what_is_odd(sampler: FlashInferSampler, device: torch.device, vocabulary: int) -> str | None:
    """Draws from a few tokens, far apart in the vocabulary, and counts them."""
    likely = torch.tensor(_LIKELY[:vocabulary])
    tokens = torch.linspace(0, vocabulary - 1, len(likely)).long()
    logits = torch.full((_ROWS, vocabulary), -torch.inf)
    logits[:, tokens] = likely.log()
    logits, rows = logits.to(device), _rows([SamplingParams(temperature=1.0)] * _ROWS)
    turns = [sampler.draw(logits, rows).cpu() for _ in range(_TURNS)]
    if vocabulary > 1 and torch.equal(turns[0], turns[1]):
        return "its trial drew the same tokens again"
    counts = torch.bincount(torch.cat(turns).clamp(min=0), minlength=vocabulary)
    expected = _ROWS * _TURNS * likely / likely.sum()
    if counts[tokens].sum() < _ROWS * _TURNS:
        return "its trial drew tokens that cannot be"
    chi_square = float(((counts[tokens] - expected) ** 2 / expected).sum())
    return None if chi_square <= _MOST_CHI_SQUARE else f"its trial's draws are off: chi-square is {chi_square:.3g}"


def _rows(params: Sequence[SamplingParams]) -> SamplingRows:
    return SamplingRows.of(params, [0] * len(params), np.arange(len(params)).tolist())
