"""A backend on another device than its caller's tensors: the table of cases is kept on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model_runner.attention import AttentionBackend, AttentionShape
from model_runner.batch import StepBatch


class OnDevice(AttentionBackend):
    """Moves what goes in to a device and what comes out back."""

    name = "moved"

    def __init__(self, kind: type[AttentionBackend], device: torch.device, shape: AttentionShape) -> None:
        super().__init__(shape)
        self._device = device
        self._inner = kind(replace(shape, device=device))
        self.keys, self.values = self._inner.keys, self._inner.values

    def plan(self, batch: StepBatch) -> None:
        self._inner.plan(moved(batch, self._device))

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rows = (each.to(self._device) for each in (queries, keys, values))
        return self._inner.run(layer, *rows).cpu()

    def _slots(self, cache: Tensor, blocks: Tensor, slots: Tensor) -> Any:
        return self._inner._slots(cache, blocks, slots)


def moved(batch: StepBatch, device: torch.device) -> StepBatch:
    """The batch with all its tensors there, but for those of the host."""
    names = (
        *("token_ids", "positions", "slot_mapping", "query_offsets", "sequence_lengths", "block_tables"),
        "logits_rows",
    )
    return replace(batch, **{name: getattr(batch, name).to(device) for name in names})
