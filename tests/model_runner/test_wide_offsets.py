"""Offsets on the way from block tables to kernels, in a cache of more than 2**31 numbers that is not allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model_runner.attention import AttentionShape
from model_runner.attention.reference import ReferenceAttention
from model_runner.batch import BatchEntry, StepBatch
from model_runner.books import CopyOrder
from model_runner.device_copies import Uploads
from model_runner.executor import TorchExecutor
from tests.model_runner.attention_world import CPU
from tests.model_runner.test_device_copies import SlowLane

META = torch.device("meta")
LAST = 2**31 // 16 + 7
"""A block of 16 slots that begins beyond slot 2**31."""


class Recorder:
    """A model that keeps what it is to compute."""

    def forward(self, batch: StepBatch, backend: object) -> torch.Tensor:
        self.batch = batch
        return torch.zeros(1, 1)


@pytest.mark.parametrize("is_sent", [True, False])
def test_slots_as_they_are_sent(is_sent: bool) -> None:
    """Tokens 30 to 33 in blocks LAST - 1 and LAST + 2: its slots 14 and 15, then 0 and 1 of the other."""
    model, lane = Recorder(), SlowLane()
    backend: Any = None
    executor = TorchExecutor(model, backend, 16, CPU)
    entries = [BatchEntry([1, 2, 3, 4], 30, [5, LAST - 1, LAST + 2], 1)]
    if is_sent:
        executor.follow(entries, [], None, Uploads(lane, CPU).send)
    else:
        executor.execute(entries, [])
    slots = model.batch.slot_mapping
    assert slots.dtype == torch.int64
    assert slots.tolist() == [2**31 + 110, 2**31 + 111, 2**31 + 144, 2**31 + 145]
    assert model.batch.block_tables.tolist() == [[5, LAST - 1, LAST + 2]]


def test_writes_and_copies_index_by_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that has shapes and no memory: 2**31 slots and more of 8 heads of 128 dimensions."""
    shape = AttentionShape(2, 32, 8, 128, 16, LAST + 1, torch.bfloat16, META, query_dtype=torch.bfloat16)
    backend = ReferenceAttention(shape)
    assert backend.keys.numel() > 2**31
    assert backend.keys.stride(0) > 2**40
    orders: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        orders.append(tensor)
        return tensor.to(device)

    monkeypatch.setattr("model_runner.attention.backend.to_device", noted)
    backend.copy_blocks([CopyOrder(LAST, LAST - 1, 1)])
    (order,) = orders
    assert (order.dtype, order.tolist()) == (torch.int64, [[LAST], [0], [LAST - 1], [0]])
