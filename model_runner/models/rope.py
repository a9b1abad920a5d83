"""Rotary position embedding: the frequencies of a model, and their cosines and sines for a step's positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_runner.config import ModelConfig, RopeScaling


class Rope:
    """Rotates pairs (i, i + head_dim / 2), as Hugging Face checkpoints expect."""

    def __init__(self, config: ModelConfig, device: torch.device, freq_factors: Tensor | None = None) -> None:
        """freq_factors: [head_dim / 2], by which a GGUF file divides the frequencies; instead of config's scaling."""
        dim = config.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        if freq_factors is not None:
            frequencies = frequencies / freq_factors.float().cpu()
        elif config.rope_scaling is not None:
            frequencies = _scaled(frequencies, config.rope_scaling)
        self._frequencies = frequencies.to(device)

    def at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of int64 positions [T]: [T, 1, head_dim / 2] each."""
        angles = positions.float()[:, None, None] * self._frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, heads, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _scaled(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's rule: long waves are stretched by `factor`, short ones stay, those between are blended."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)
