"""The layout that GPU kernels share: a token's heads lie side by side, and a block's tokens one after the other."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionShape, stored
from model_runner.books import CopyOrder
from model_runner.device_copies import to_device

_COPY_LANES = 1024
"""Numbers of a block that one program copies."""


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
        for cache, new, scale in ((self.keys, keys, shape.k_scale(layer)), (self.values, values, shape.v_scale(layer))):
            cache[layer].view(-1, *new.shape[1:])[slot_mapping] = stored(new, scale, cache.dtype)

    def _slots(self, cache: Tensor, blocks: Tensor, slots: Tensor) -> Any:
        return slice(None), blocks, slots


class GpuAttention(NhdAttention):
    """Copies blocks by one kernel for all copies and layers, where there is Triton."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        has_kernels = why_no_triton(shape.device) is None
        self._kernels: Any = importlib.import_module("model_runner.attention.triton_kernels") if has_kernels else None

    def copy_blocks(self, copies: Sequence[CopyOrder]) -> None:
        if self._kernels is None:
            super().copy_blocks(copies)
            return
        if not copies:
            return
        shape = self.shape
        numbers = [(copy.source, copy.target, copy.num_tokens) for copy in copies]
        orders = to_device(torch.tensor(numbers, dtype=torch.int32), shape.device)
        slot = shape.num_kv_heads * shape.head_dim
        self._kernels.copy_blocks[(shape.num_layers, -(-shape.block_size * slot // _COPY_LANES))](
            self.keys,
            self.values,
            orders,
            len(copies),
            self.keys.stride(0),
            self.keys.stride(1),
            SLOT_NUMBERS=slot,
            LANES=_COPY_LANES,
        )


def why_no_triton(device: torch.device) -> str | None:
    """Why no kernels in Triton run on a device, in a phrase; None when they do."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1" or device.type == "cuda":
        return None
    return f"the device is {device}"
