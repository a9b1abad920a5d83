"""Attention for CPUs by the kernels, which walk the block table: nothing is gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from model_runner import native
from model_runner.attention.backend import AttentionBackend, AttentionShape, name_of
from model_runner.batch import StepBatch


class CpuAttention(AttentionBackend):
    """Keys lie by dimensions, values by tokens: both products of attention read a block from front to back.

    keys: [layers, blocks, kv heads, head_dim / pair, block_size, pair], where pair is 2 in bfloat16, else 1; values:
    [layers, blocks, kv heads, block_size, head_dim]. A query's result is the same bit by bit in any batch, in any
    chunks, in any blocks and with any number of threads.
    """

    name = "cpu"
    batch_invariant = True

    def __init__(self, shape: AttentionShape) -> None:
        """The shape must be one that why_not() has nothing against."""
        super().__init__(shape)
        heads = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        pair = native.key_pair(shape.kv_dtype)
        self.keys = native.zeros((*heads, shape.head_dim // pair, shape.block_size, pair), shape.kv_dtype)
        self.values = native.zeros((*heads, shape.block_size, shape.head_dim), shape.kv_dtype)
        self._cache = native.c_cache(self.keys, self.values, shape.sliding_window)
        self._batch: StepBatch
        self._step: native.CBatch

    @classmethod
    def why_not_here(cls, device: torch.device) -> str | None:
        return native.why_not() if device.type == "cpu" else f"the device is {device}"

    @classmethod
    def why_not_shape(cls, shape: AttentionShape) -> str | None:
        if shape.kv_dtype not in (torch.float32, torch.bfloat16):
            return f"the CPU kernels know no K/V in {name_of(shape.kv_dtype)}"
        if shape.block_size & (shape.block_size - 1):
            return f"blocks of {shape.block_size} tokens are no power of two"
        if shape.head_dim % 2:
            return f"{shape.head_dim} dimensions of a head are an odd number"
        if shape.logits_soft_cap is not None:
            return "the CPU kernels know no soft cap of logits"
        return None if shape.scales is None else "the CPU kernels know no scales of K/V"

    @property
    def cache(self) -> native.CCache:
        """The K/V as the kernels see it."""
        return self._cache

    def plan(self, batch: StepBatch) -> None:
        # The step points into the batch, which must stay.
        self._batch, self._step = batch, native.c_batch(batch)

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attended = native.attend(self._step, self._cache, layer, self.shape.scale, queries, keys, values)
        return attended.to(queries.dtype)

    def _slots(self, cache: Tensor, blocks: Tensor, slots: Tensor) -> Any:
        heads = (slice(None),) * (2 if cache is self.keys else 1)
        return (slice(None), blocks, *heads, slots)
