"""A model's weights with some matrices multiplied: the same function, if what one grows another makes good."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bench.reworked import ReworkedWeights
from model_runner.weights import WeightSource

FAR_OUT = {"q_proj.weight": 2**-6, "k_proj.weight": 2**6, "v_proj.weight": 2**-8, "o_proj.weight": 2**8}
"""Keys 64 times as large, of which some are beyond 8 bits, and values of which most are below."""


class RescaledWeights(ReworkedWeights):
    """A WeightSource over another one. factors: by how the names of tensors end; powers of two round nothing."""

    def __init__(self, weights: WeightSource, factors: Mapping[str, float]) -> None:
        super().__init__(weights)
        self._factors = factors

    def load(self, name: str) -> Tensor:
        factor = next((factor for end, factor in self._factors.items() if name.endswith(end)), 1.0)
        return self._weights.load(name) * factor
