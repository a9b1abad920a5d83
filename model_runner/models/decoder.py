"""The Llama family as one decoder by config: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Covers Llama 2 and 3, Mistral, SmolLM2, Qwen2 (bias on q, k, v) and Qwen3 (norms on q and k), with a tied or an own
output head. Works on packed batches: every tensor has one row for each token of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model_runner.attention.backend import AttentionBackend
from model_runner.batch import StepBatch
from model_runner.config import ModelConfig
from model_runner.errors import ModelLoadError
from model_runner.models.rope import Rope, rotate
from model_runner.weights import WeightSource


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of one layer; each matrix is [outputs, inputs]. q, k, v and gate, up are stacked to one matrix."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """A loaded model. forward() keeps no state: K/V lives in the attention backend."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Takes the weights over as `dtype` on `device`; on_progress gets bytes done and in all, as they are read.

        Raises ModelLoadError for a tensor that is missing or has another shape than the config says.
        """
        loader = _Loader(weights, dtype, device, on_progress)
        c = config
        self.config = c
        _refuse_more_layers(weights, c.num_layers)
        self._embedding = loader.tensor("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self._layers = [_load_layer(loader, c, index) for index in range(c.num_layers)]
        self._norm = loader.tensor("model.norm.weight", (c.hidden_size,))
        self._head = (
            self._embedding if c.tie_word_embeddings else loader.tensor("lm_head.weight", (c.vocab_size, c.hidden_size))
        )
        self._rope = Rope(c, device, weights.rope_freq_factors())

    def forward(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        """Logits of batch.logits_rows: float32 [R, vocab_size]. Writes the K/V of all rows into the backend."""
        backend.plan(batch)
        hidden = functional.embedding(batch.token_ids, self._embedding)
        cos, sin = self._rope.at(batch.positions, hidden.dtype)
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attend(layer, index, self._normed(hidden, layer.input_norm), cos, sin, backend)
            hidden = hidden + _mlp(layer, self._normed(hidden, layer.mlp_norm))
        rows = self._normed(hidden[batch.logits_rows], self._norm)
        return functional.linear(rows, self._head).float()

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.config.rms_norm_eps)

    def _attend(
        self, layer: _Layer, index: int, hidden: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend
    ) -> Tensor:
        c = self.config
        heads = functional.linear(hidden, layer.qkv, layer.qkv_bias).view(len(hidden), -1, c.head_dim)
        queries, keys, values = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            queries, keys = self._normed(queries, layer.q_norm), self._normed(keys, layer.k_norm)
        attended = backend.run(index, rotate(queries, cos, sin), rotate(keys, cos, sin), values)
        return functional.linear(attended.flatten(1), layer.output)


def _mlp(layer: _Layer, hidden: Tensor) -> Tensor:
    gate, up = functional.linear(hidden, layer.gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, layer.down)


def _refuse_more_layers(weights: WeightSource, num_layers: int) -> None:
    """A config that stops short of the weights would load, and compute something else."""
    for name in weights.names():
        if name.startswith(f"model.layers.{num_layers}."):
            raise ModelLoadError(f"{weights.file_of(name)} has {name}, and the config says {num_layers} layers.")


class _Loader:
    """Reads tensors by name, checks their shapes and tells how far it is."""

    def __init__(
        self,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._done = 0

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._weights.load(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self._weights.file_of(name)}: tensor {name} has shape {list(tensor.shape)}, and the config says "
                f"{list(shape)}."
            )
        self._done += self._weights.bytes_of(name)
        if self._on_progress is not None:
            self._on_progress(self._done, self._weights.total_bytes)
        return tensor.to(self._device, self._dtype)

    def stacked(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        return torch.cat([self.tensor(name, shape) for name, shape in parts])


def _load_layer(loader: _Loader, c: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows = {"q": c.num_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}
    qkv = [(f"{attention}.{part}_proj.weight", (count, c.hidden_size)) for part, count in rows.items()]
    bias = [(f"{attention}.{part}_proj.bias", (count,)) for part, count in rows.items()]
    gate_up = [(f"{mlp}.{part}_proj.weight", (c.intermediate_size, c.hidden_size)) for part in ("gate", "up")]
    head = (c.head_dim,)
    return _Layer(
        input_norm=loader.tensor(f"{prefix}.input_layernorm.weight", (c.hidden_size,)),
        qkv=loader.stacked(qkv),
        qkv_bias=loader.stacked(bias) if c.qkv_bias else None,
        q_norm=loader.tensor(f"{attention}.q_norm.weight", head) if c.qk_norm else None,
        k_norm=loader.tensor(f"{attention}.k_norm.weight", head) if c.qk_norm else None,
        output=loader.tensor(f"{attention}.o_proj.weight", (c.hidden_size, c.num_heads * c.head_dim)),
        mlp_norm=loader.tensor(f"{prefix}.post_attention_layernorm.weight", (c.hidden_size,)),
        gate_up=loader.stacked(gate_up),
        down=loader.tensor(f"{mlp}.down_proj.weight", (c.hidden_size, c.intermediate_size)),
    )
