"""The tensors that a decoder is made of: their names and shapes, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.config import ModelConfig
from model_runner.errors import ModelLoadError
from model_runner.weights import Grouped, WeightSource

Part = tuple[str, tuple[int, ...]]
"""A tensor's name and the shape that the config gives it."""


@dataclass(frozen=True, slots=True)
class WholeParts:
    """What the model has once. head: None when it is the embedding."""

    embedding: Part
    norm: Part
    head: Part | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a layer has; matrices that are stacked to one come in their order. Empty or None: not in this model."""

    input_norm: Part
    qkv: tuple[Part, ...]
    qkv_bias: tuple[Part, ...]
    q_norm: Part | None
    k_norm: Part | None
    output: Part
    mlp_norm: Part
    gate_up: tuple[Part, ...]
    down: Part


def whole_parts(c: ModelConfig) -> WholeParts:
    matrix = (c.vocab_size, c.hidden_size)
    return WholeParts(
        embedding=("model.embed_tokens.weight", matrix),
        norm=("model.norm.weight", (c.hidden_size,)),
        head=None if c.tie_word_embeddings else ("lm_head.weight", matrix),
    )


def layer_parts(c: ModelConfig, index: int) -> LayerParts:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}
    bias = tuple((f"{attention}.{part}_proj.bias", (count,)) for part, count in rows.items())
    head = (c.head_dim,)
    return LayerParts(
        input_norm=(f"{prefix}.input_layernorm.weight", (c.hidden_size,)),
        qkv=tuple((f"{attention}.{part}_proj.weight", (count, c.hidden_size)) for part, count in rows.items()),
        qkv_bias=bias if c.qkv_bias else (),
        q_norm=(f"{attention}.q_norm.weight", head) if c.qk_norm else None,
        k_norm=(f"{attention}.k_norm.weight", head) if c.qk_norm else None,
        output=(f"{attention}.o_proj.weight", (c.hidden_size, c.num_heads * c.head_dim)),
        mlp_norm=(f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)),
        gate_up=tuple((f"{mlp}.{part}_proj.weight", (c.intermediate_size, c.hidden_size)) for part in ("gate", "up")),
        down=(f"{mlp}.down_proj.weight", (c.hidden_size, c.intermediate_size)),
    )


def refuse_more_layers(weights: WeightSource, num_layers: int) -> None:
    """A config that stops short of the weights would load, and compute something else. Raises ModelLoadError."""
    for name in weights.names():
        if name.startswith(f"model.layers.{num_layers}."):
            raise ModelLoadError(f"{weights.file_of(name)} has {name}, and the config says {num_layers} layers.")


class TensorLoader:
    """Reads tensors by name, checks their shapes and tells how far it is, in bytes done and in all."""

    def __init__(
        self,
        weights: WeightSource,
        on_progress: Callable[[int, int], None] | None,
        convert: Callable[[Tensor], Tensor],
    ) -> None:
        """convert: what becomes of each tensor."""
        self._weights = weights
        self._on_progress = on_progress
        self._convert = convert
        self._done = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Raises ModelLoadError for a tensor that is missing or has another shape."""
        tensor = self._weights.load(name)
        self._check(name, tuple(tensor.shape), shape)
        return self._convert(tensor)

    def stacked(self, parts: Sequence[Part]) -> Tensor:
        return torch.cat([self.tensor(name, shape) for name, shape in parts])

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor | Grouped:
        """The tensor as it is stored, where it can be read so; not converted. Raises as tensor() does."""
        stored = self._weights.load_exact(name)
        self._check(name, tuple((stored if isinstance(stored, Tensor) else stored.numbers).shape), shape)
        return stored

    def _check(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise ModelLoadError(
                f"{self._weights.file_of(name)}: tensor {name} has shape {list(found)}, and the config says "
                f"{list(expected)}."
            )
        self._done += self._weights.bytes_of(name)
        if self._on_progress is not None:
            self._on_progress(self._done, self._weights.total_bytes)
