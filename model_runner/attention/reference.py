"""Attention in plain torch, one sequence at a time: the oracle of every other backend."""

from __future__ import annotations

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionShape
from model_runner.batch import StepBatch


class ReferenceAttention(AttentionBackend):
    """K/V as [layers, blocks, block_size, kv heads, head_dim] (NHD); softmax in float32."""

    name = "reference"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        size = (shape.num_layers, shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._batch: StepBatch

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = self._batch
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache.view(-1, *new.shape[1:])[batch.slot_mapping] = new.to(cache.dtype)
        output = torch.empty_like(queries)
        first = 0
        for row, (count, length) in enumerate(zip(batch.query_lengths, batch.lengths, strict=True)):
            here = slice(first, first + count)
            output[here] = self._attend(queries[here], layer, batch.block_tables[row], length).to(output.dtype)
            first += count
        return output

    def _attend(self, queries: Tensor, layer: int, block_table: Tensor, length: int) -> Tensor:
        """The last `len(queries)` positions of a sequence of `length` tokens: [q, num_heads, head_dim]."""
        shape = self.shape
        blocks = block_table[: -(-length // shape.block_size)].long()
        keys, values = (
            cache[layer][blocks].flatten(0, 1)[:length].float().repeat_interleave(shape.group_size, dim=1)
            for cache in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * shape.scale
        scores.masked_fill_(~visible(len(queries), length, shape.sliding_window, queries.device), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)

    def _slots(self, cache: Tensor, block: int, num_tokens: int) -> Tensor:
        return cache[:, block, :num_tokens]


def visible(num_queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `length` keys each of the last `num_queries` positions sees: bool [num_queries, length]."""
    query = torch.arange(length - num_queries, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
