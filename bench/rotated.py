"""A model's weights in another basis of its hidden states: the same function, but from other numbers.

The demo model's file has 4-bit weights, which rounding to int4 would leave as they are. Turned by a random rotation
they are ordinary numbers again, so that the error of every form can be measured on them. RMSNorm commutes with a
rotation once its weights are multiplied into the matrices behind it (Ashkboos et al., SliceGPT, 2024). Random rotations
also spread outliers over all inputs, so that rounding does less harm here than to weights as they are trained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from bench.reworked import ReworkedWeights
from model_runner.config import ModelConfig
from model_runner.models.parts import layer_parts, whole_parts
from model_runner.weights import WeightSource

HEAD = "lm_head.weight"


def rotated_config(config: ModelConfig) -> ModelConfig:
    """The head has the last norm's weights in it, and the embedding has not."""
    return replace(config, tie_word_embeddings=False)


class RotatedWeights(ReworkedWeights):
    """A WeightSource over another one, which keeps what it has turned. The config is the original's."""

    def __init__(self, weights: WeightSource, config: ModelConfig, seed: int = 0) -> None:
        super().__init__(weights)
        draw = torch.Generator().manual_seed(seed)
        size = config.hidden_size
        self._turn = torch.linalg.qr(torch.randn(size, size, generator=draw, dtype=torch.float64)).Q
        whole = whole_parts(config)
        layers = [layer_parts(config, index) for index in range(config.num_layers)]
        self._embedding = whole.embedding[0]
        self._head = whole.head[0] if whole.head else self._embedding
        # Matrices by the norm in front of them, and those that write to the hidden states.
        self._reads = {part[0]: each.input_norm[0] for each in layers for part in each.qkv}
        self._reads |= {part[0]: each.mlp_norm[0] for each in layers for part in each.gate_up}
        self._reads[HEAD] = whole.norm[0]
        self._turned: dict[str, Tensor] = {}
        self._writes = {part[0] for each in layers for part in (each.output, each.down)}

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self.names()))

    def names(self) -> Collection[str]:
        return [*(name for name in self._weights.names() if name != HEAD), HEAD]

    def load(self, name: str) -> Tensor:
        if name not in self._turned:
            self._turned[name] = self._turned_weights(name)
        return self._turned[name]

    def _turned_weights(self, name: str) -> Tensor:
        weights = self._weights.load(self._source(name)).double()
        if name == self._embedding:
            weights = weights @ self._turn
        elif name in self._reads:
            weights = weights * self._weights.load(self._reads[name]).double() @ self._turn
        elif name in self._writes:
            weights = self._turn.T @ weights
        elif name in self._reads.values():
            weights = torch.ones_like(weights)
        return weights.float()

    def _source(self, name: str) -> str:
        return self._head if name == HEAD else name
