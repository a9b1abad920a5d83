"""Attention for CPUs in torch: gathers each sequence's blocks and runs the fused kernel at its exact length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model_runner.attention.backend import AttentionBackend, AttentionShape, capped, stored
from model_runner.attention.reference import visible
from model_runner.batch import StepBatch


@dataclass(frozen=True, slots=True)
class _SequencePlan:
    """One sequence's rows in the batch, the blocks that hold its visible keys, and which of their slots those are.

    blocks: int64 [kv heads x blocks], head by head, where a block's part of one head counts as a block of its own.
    mask: bool [group_size x queries, keys], None when every query sees every key.
    """

    first_row: int
    num_rows: int
    blocks: Tensor
    first_slot: int
    last_slot: int
    mask: Tensor | None


class TorchCpuAttention(AttentionBackend):
    """K/V as [layers, blocks, kv heads, block_size, head_dim] (HND), so that one head's slots lie together.

    The query heads of a KV head become rows of one matrix: no key is repeated. Every sequence is computed on its own
    at its exact length, so no sequence's result depends on its neighbours.
    """

    name = "cpu_torch"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        size = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.keys = torch.zeros(size, dtype=shape.kv_dtype, device=shape.device)
        self.values = torch.zeros(size, dtype=shape.kv_dtype, device=shape.device)
        self._plans: list[_SequencePlan] = []

    def plan(self, batch: StepBatch) -> None:
        size = self.shape.block_size
        self._target_blocks = batch.slot_mapping // size
        self._target_slots = batch.slot_mapping % size
        self._plans = []
        first = 0
        for table, count, length in zip(batch.block_tables, batch.query_lengths, batch.lengths, strict=True):
            self._plans.append(self._plan_sequence(table, first, count, length))
            first += count

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape = self.shape
        for cache, new, scale in ((self.keys, keys, shape.k_scale(layer)), (self.values, values, shape.v_scale(layer))):
            cache[layer][self._target_blocks, :, self._target_slots] = stored(new, scale, cache.dtype)
        grouped = queries.view(-1, shape.num_kv_heads, shape.group_size, shape.head_dim)
        output = torch.empty_like(grouped)
        for plan in self._plans:
            rows = slice(plan.first_row, plan.first_row + plan.num_rows)
            output[rows] = self._attend(layer, grouped[rows], plan)
        return output.view(queries.shape)

    def _plan_sequence(self, table: Tensor, first_row: int, count: int, length: int) -> _SequencePlan:
        size, window = self.shape.block_size, self.shape.sliding_window
        first_key = self.shape.first_visible(length - count)
        first_block = first_key // size
        mask = None
        if count > 1:
            seen = visible(count, length, window, self.shape.device)[:, first_key:]
            mask = seen.repeat(self.shape.group_size, 1)
        return _SequencePlan(
            first_row=first_row,
            num_rows=count,
            blocks=self._by_head(table[first_block : -(-length // size)]),
            first_slot=first_key - first_block * size,
            last_slot=length - first_block * size,
            mask=mask,
        )

    def _attend(self, layer: int, queries: Tensor, plan: _SequencePlan) -> Tensor:
        """queries and result: [rows, kv heads, group_size, head_dim]."""
        shape = self.shape
        keys = self._numbers(self._gather(self.keys[layer], plan), shape.k_scale(layer))
        values = self._numbers(self._gather(self.values[layer], plan), shape.v_scale(layer))
        rows, heads, group, dim = queries.shape
        folded = queries.permute(1, 2, 0, 3).reshape(1, heads, group * rows, dim).to(keys.dtype)
        if shape.logits_soft_cap is None:
            attended = functional.scaled_dot_product_attention(
                folded, keys[None], values[None], attn_mask=plan.mask, scale=shape.scale
            )
        else:
            attended = _attend_capped(folded, keys, values, plan.mask, shape.scale, shape.logits_soft_cap)
        return attended.view(heads, group, rows, dim).permute(2, 0, 1, 3).to(queries.dtype)

    @staticmethod
    def _numbers(cached: Tensor, scale: float) -> Tensor:
        """What can be computed with: 8 bits and scaled numbers become float32."""
        return cached if cached.dtype.itemsize > 1 and scale == 1 else cached.float() * scale

    def _by_head(self, blocks: Tensor) -> Tensor:
        heads = self.shape.num_kv_heads
        return (blocks.long() * heads + torch.arange(heads, device=blocks.device)[:, None]).flatten()

    def _gather(self, cache: Tensor, plan: _SequencePlan) -> Tensor:
        """The visible slots of a sequence: [kv heads, keys, head_dim].

        Gathered in the order of heads, so that what is copied once can be read as it lies.
        """
        shape = self.shape
        blocks = cache.view(-1, shape.block_size * shape.head_dim).index_select(0, plan.blocks)
        slots = blocks.view(shape.num_kv_heads, -1, shape.head_dim)
        return slots[:, plan.first_slot : plan.last_slot]

    def _slots(self, cache: Tensor, blocks: Tensor, slots: Tensor) -> Any:
        return slice(None), blocks, slice(None), slots


def _attend_capped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, cap: float
) -> Tensor:
    """What the fused kernel does, which has no cap.

    queries: [1, heads, rows, head_dim]; keys, values: [heads, keys, head_dim]. Returns what queries look like.
    """
    scores = capped((queries.float() @ keys.float().mT) * scale, cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ values.float()
