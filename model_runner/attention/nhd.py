"""The layout that GPU kernels share: a token's heads lie side by side, and a block's tokens one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionShape, stored


class NhdAttention(AttentionBackend):
    """K/V as [layers, blocks, block_size, kv heads, head_dim] (NHD), written by slot mapping."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        size = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=shape.kv_dtype, device=shape.device)
        self.values = torch.zeros(size, dtype=shape.kv_dtype, device=shape.device)

    def _write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        """Puts keys and values, [T, kv heads, head_dim], to the slots, int64 [T]."""
        shape = self.shape
        for cache, new, scale in ((self.keys, keys, shape.k_scale), (self.values, values, shape.v_scale)):
            cache[layer].view(-1, *new.shape[1:])[slot_mapping] = stored(new, scale, cache.dtype)

    def _slots(self, cache: Tensor, block: int, num_tokens: int) -> Tensor:
        return cache[:, block, :num_tokens]
