"""Rotary position embedding: the frequencies of a model, and their cosines and sines for a step's positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from model_runner.config import ModelConfig, RopeScaling

_PAGE = 1024
"""Positions that a RopeTable computes at once."""


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


class RopeTable:
    """A Rope on a CPU that looks positions up: sines cost a hundred times as much, and are computed once.

    Entries are computed page by page, on a grid that no batch can move, so that they are always the same bits.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._cos, self._sin = self._page(0)

    def at(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions below `end`, int64 [T]: float32 [T, 1, head_dim / 2] each."""
        missing = end - len(self._cos)
        if missing > 0:
            # By half as much again, so that a growing sequence does not pay at each page.
            self._grow(max(missing, len(self._cos) // 2))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _grow(self, count: int) -> None:
        first = len(self._cos)
        pages = [self._page(start) for start in range(first, first + count, _PAGE)]
        self._cos = torch.cat([self._cos, *(cos for cos, _ in pages)])
        self._sin = torch.cat([self._sin, *(sin for _, sin in pages)])

    def _page(self, start: int) -> tuple[Tensor, Tensor]:
        return self._rope.at(torch.arange(start, start + _PAGE), torch.float32)


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
