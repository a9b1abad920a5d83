"""A model of any shape with random weights, made on the device: no checkpoint, nothing to download."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor

from model_runner.config import ModelConfig
from model_runner.loading import LoadedModel
from model_runner.models.decoder import Decoder
from model_runner.models.parts import Part, layer_parts, whole_parts
from model_runner.tokenizer import Tokenizer
from model_runner.weights import Grouped

SPREAD = 0.02
"""Standard deviation of matrices, as of freshly made models."""


class RandomWeights:
    """A WeightSource that draws each tensor on a device when it is asked for: matrices small, norms 1."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._shapes = dict(_parts(config))
        self._dtype = dtype
        self._device = device
        self._draw = torch.Generator(device).manual_seed(seed)

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self._shapes))

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def bytes_of(self, name: str) -> int:
        return prod(self._shapes[name]) * self._dtype.itemsize

    def file_of(self, name: str) -> Path:
        return Path("random")

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device, generator=self._draw).mul_(SPREAD)

    def load_exact(self, name: str) -> Tensor | Grouped:
        return self.load(name)

    def rope_freq_factors(self) -> Tensor | None:
        return None

    def files(self) -> list[Path]:
        return []


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A decoder of this shape, with a tokenizer that knows no word."""
    model = Decoder(config, RandomWeights(config, dtype, device), dtype, device)
    name = str(dtype).removeprefix("torch.")
    tokenizer = Tokenizer(Backend(WordLevel({"?": 0}, unk_token="?")))
    return LoadedModel("random", config, model, tokenizer, dtype, name, name, "random")


def _parts(config: ModelConfig) -> list[Part]:
    """The names and shapes of all tensors."""
    whole = whole_parts(config)
    parts = [whole.embedding, whole.norm, *([whole.head] if whole.head else [])]
    for index in range(config.num_layers):
        layer = layer_parts(config, index)
        lone = (layer.input_norm, layer.q_norm, layer.k_norm, layer.output, layer.mlp_norm, layer.down)
        parts += [part for part in lone if part is not None]
        parts += [*layer.qkv, *layer.qkv_bias, *layer.gate_up]
    return parts
