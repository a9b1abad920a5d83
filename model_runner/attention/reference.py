"""Attention in plain torch, one sequence at a time: the oracle of every other backend."""

from __future__ import annotations

import torch
from torch import Tensor

from model_runner.attention.backend import capped
from model_runner.attention.nhd import NhdAttention
from model_runner.batch import StepBatch


class ReferenceAttention(NhdAttention):
    """Scores and softmax in float32, on any device."""

    name = "reference"
    _batch: StepBatch

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch = self._batch
        self._write(layer, keys, values, batch.slot_mapping)
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
        # What no query sees any more may be another's by now.
        first = shape.first_visible(length - len(queries))
        blocks = block_table[first // shape.block_size : -(-length // shape.block_size)].long()
        here = slice(first % shape.block_size, first % shape.block_size + length - first)
        keys, values = (
            scale * cache[layer][blocks].flatten(0, 1)[here].float().repeat_interleave(shape.group_size, dim=1)
            for cache, scale in ((self.keys, shape.k_scale(layer)), (self.values, shape.v_scale(layer)))
        )
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * shape.scale
        seen = visible(len(queries), length, shape.sliding_window, queries.device)[:, first:]
        scores = capped(scores, shape.logits_soft_cap).masked_fill(~seen, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


def visible(num_queries: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Which of `length` keys each of the last `num_queries` positions sees: bool [num_queries, length]."""
    query = torch.arange(length - num_queries, length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
