"""Attention for CPUs by the kernels, which walk the block table: nothing is gathered."""

from __future__ import annotations

import torch
from torch import Tensor

from model_runner import native
from model_runner.attention.backend import AttentionBackend, AttentionShape
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
        """The shape must be one that can_have() accepts."""
        super().__init__(shape)
        heads = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        pair = native.key_pair(shape.dtype)
        self.keys = native.zeros((*heads, shape.head_dim // pair, shape.block_size, pair), shape.dtype)
        self.values = native.zeros((*heads, shape.block_size, shape.head_dim), shape.dtype)
        self._cache = native.c_cache(self.keys, self.values, shape.sliding_window)
        self._batch: StepBatch
        self._step: native.CBatch

    @staticmethod
    def can_have(shape: AttentionShape) -> bool:
        """Whether the kernels are there and know such a cache."""
        fits = shape.block_size & (shape.block_size - 1) == 0 and shape.head_dim % 2 == 0
        is_known = shape.dtype in (torch.float32, torch.bfloat16) and fits
        return is_known and shape.device.type == "cpu" and native.library() is not None

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

    def _slots(self, cache: Tensor, block: int, num_tokens: int) -> Tensor:
        return cache[:, block, :, :, :num_tokens] if cache is self.keys else cache[:, block, :, :num_tokens]
