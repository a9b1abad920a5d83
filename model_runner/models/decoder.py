"""The Llama family as one decoder by config: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Covers Llama 2 and 3, Mistral, SmolLM2, Qwen2 (bias on q, k, v) and Qwen3 (norms on q and k), with a tied or an own
output head. Works on packed batches: every tensor has one row for each token of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model_runner.attention.backend import AttentionBackend
from model_runner.batch import StepBatch
from model_runner.config import ModelConfig
from model_runner.models.parts import TensorLoader, layer_parts, refuse_more_layers, whole_parts
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

    batch_invariant = False
    """torch picks the order of a product's sums by the number of its rows."""

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
        loader = TensorLoader(weights, on_progress, lambda tensor: tensor.to(device, dtype))
        c = config
        self.config = c
        refuse_more_layers(weights, c.num_layers)
        whole = whole_parts(c)
        self._embedding = loader.tensor(*whole.embedding)
        self._layers = [_load_layer(loader, c, index) for index in range(c.num_layers)]
        self._norm = loader.tensor(*whole.norm)
        self._head = loader.tensor(*whole.head) if whole.head else self._embedding
        self._rope = Rope(c, device, weights.rope_freq_factors())

    def forward(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        """Logits of batch.logits_rows: float32 [R, vocab_size]. Writes the K/V of all rows into the backend."""
        backend.plan(batch)
        return self.compute(batch, backend)

    def compute(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        """forward() of a step that the backend has planned; reads no tensor on the host."""
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


def _load_layer(loader: TensorLoader, c: ModelConfig, index: int) -> _Layer:
    parts = layer_parts(c, index)
    return _Layer(
        input_norm=loader.tensor(*parts.input_norm),
        qkv=loader.stacked(parts.qkv),
        qkv_bias=loader.stacked(parts.qkv_bias) if parts.qkv_bias else None,
        q_norm=loader.tensor(*parts.q_norm) if parts.q_norm else None,
        k_norm=loader.tensor(*parts.k_norm) if parts.k_norm else None,
        output=loader.tensor(*parts.output),
        mlp_norm=loader.tensor(*parts.mlp_norm),
        gate_up=loader.stacked(parts.gate_up),
        down=loader.tensor(*parts.down),
    )
