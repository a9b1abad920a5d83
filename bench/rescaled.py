"""A model's weights with some matrices multiplied: the same function, if what one grows another makes good."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from model_runner.weights import Grouped, WeightSource

FAR_OUT = {"q_proj.weight": 2**-6, "k_proj.weight": 2**6, "v_proj.weight": 2**-8, "o_proj.weight": 2**8}
"""Keys 64 times as large, of which some are beyond 8 bits, and values of which most are below."""


class RescaledWeights:
    """A WeightSource over another one. factors: by how the names of tensors end; powers of two round nothing."""

    def __init__(self, weights: WeightSource, factors: Mapping[str, float]) -> None:
        self._weights = weights
        self._factors = factors

    @property
    def total_bytes(self) -> int:
        return self._weights.total_bytes

    def names(self) -> Collection[str]:
        return self._weights.names()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._weights.shape_of(name)

    def bytes_of(self, name: str) -> int:
        return self._weights.bytes_of(name)

    def file_of(self, name: str) -> Path:
        return self._weights.file_of(name)

    def load(self, name: str) -> Tensor:
        factor = next((factor for end, factor in self._factors.items() if name.endswith(end)), 1.0)
        return self._weights.load(name) * factor

    def load_exact(self, name: str) -> Tensor | Grouped:
        return self.load(name)

    def rope_freq_factors(self) -> Tensor | None:
        return self._weights.rope_freq_factors()

    def files(self) -> list[Path]:
        return self._weights.files()
