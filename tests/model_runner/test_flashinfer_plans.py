"""What FlashInfer's plans are given: lengths on the host, pages on the device, once a step; the host never waits."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.attention import AttentionShape, flashinfer
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.batch import BatchEntry, StepBatch, pack_batch
from tests.model_runner.attention_world import CPU
from tests.model_runner.gpu_doubles import recorded

HALF = torch.float16
SHAPE = AttentionShape(3, 4, 2, 64, 16, 90, HALF, CPU, query_dtype=HALF)
WAITS = {
    *(Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.nonzero, Tensor.__bool__, Tensor.__int__),
    Tensor.__index__,
}


class OnDevice(Tensor):
    """Stands for a tensor on a GPU: what the host reads of it, it waits for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in WAITS, f"the host waits: {func.__name__}"
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper:
    """Any of FlashInfer's: keeps what plan() was told, by name."""

    def __init__(self, name: str, plans: list[dict[str, Any]], *args: Any, **options: Any) -> None:
        made = inspect.signature(recorded("flashinfer", f"{name}.__init__")).bind(self, *args, **options).arguments
        if name == "BatchDecodeWithPagedKVCacheWrapper":
            # Its own choice can be cuDNN's decode, whose plan reads the indices of pages on the host.
            assert made["backend"] == "fa2"
        self._signature = inspect.signature(recorded("flashinfer", f"{name}.plan"))
        self._plans = plans

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._plans.append(dict(self._signature.bind(self, *args, **kwargs).arguments))

    def run(self, queries: Tensor, cached: Any, return_lse: bool = False) -> Any:
        return (queries, queries[..., 0].float()) if return_lse else queries


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setattr(flashinfer, "to_device", lambda tensor, device: tensor.clone().as_subclass(OnDevice))
    return []


def backend(plans: list[dict[str, Any]], shape: AttentionShape = SHAPE) -> FlashInferAttention:
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    wrappers = {name: partial(Wrapper, name, plans) for name in names}
    api = SimpleNamespace(
        **wrappers, append_paged_kv_cache=lambda *_, **__: None, merge_state=lambda out, *_: (out, None)
    )
    return FlashInferAttention(shape, api, workspace_bytes=16)


def batch_of(*entries: tuple[int, int, list[int]]) -> StepBatch:
    """Of (first position, tokens, block table); all but what is the host's is on the device."""
    batch = pack_batch([BatchEntry([0] * count, first, table, 1) for first, count, table in entries], 16, CPU)
    names = ("token_ids", "positions", "slot_mapping", "query_offsets", "sequence_lengths", "block_tables")
    return replace(batch, **{name: getattr(batch, name).as_subclass(OnDevice) for name in names})


SHARED = list(range(1, 41))
STEPS = {
    "decode": ([(20, 1, [3, 4]), (0, 1, [5])], 1),
    "prefill": ([(0, 20, [3, 4])], 1),
    "mixed": ([(20, 1, [3, 4]), (0, 18, [5, 6])], 2),
    "shared prefix": ([(640, 1, [*SHARED, 50 + row]) for row in range(4)], 2),
}
"""Entries, and how many wrappers have a part of them."""


@pytest.mark.parametrize("step", STEPS)
def test_lengths_are_the_host_s_and_pages_the_device_s(plans: list[dict[str, Any]], step: str) -> None:
    entries, num_plans = STEPS[step]
    backend(plans).plan(batch_of(*entries))
    assert len(plans) == num_plans
    for plan in plans:
        for name, tensor in plan.items():
            if isinstance(tensor, Tensor):
                assert isinstance(tensor, OnDevice) == name.endswith("indices"), name


def test_a_replay_s_are_too(plans: list[dict[str, Any]]) -> None:
    """The buffers of a graph are the device's, which plan() copies to."""
    backend(plans).plan_replay(batch_of((20, 1, [3, 4]), (0, 1, [5])))
    (plan,) = plans
    assert isinstance(plan["indices"], OnDevice)
    assert not isinstance(plan["indptr"], OnDevice)
    assert not isinstance(plan["last_page_len"], OnDevice)


@pytest.mark.parametrize("step", STEPS)
def test_once_a_step_and_not_once_a_layer(plans: list[dict[str, Any]], step: str) -> None:
    entries, num_plans = STEPS[step]
    ours = backend(plans)
    for number in (1, 2):
        ours.plan(batch_of(*entries))
        tokens = sum(count for _, count, _ in entries)
        rows = [torch.zeros(tokens, heads, 64, dtype=HALF).as_subclass(OnDevice) for heads in (4, 2, 2)]
        for layer in range(SHAPE.num_layers):
            ours.run(layer, *rows)
        assert len(plans) == number * num_plans


@pytest.mark.parametrize(("window", "cap"), [(None, None), (7, 30.0)])
def test_what_every_plan_is_told(plans: list[dict[str, Any]], window: int | None, cap: float | None) -> None:
    """Its defaults are not ours: float16 for queries, and no causality in prefill."""
    shape = replace(SHAPE, query_dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    entries, _ = STEPS["mixed"]
    backend(plans, replace(shape, sliding_window=window, logits_soft_cap=cap)).plan(batch_of(*entries))
    _, prefill = plans
    assert prefill["causal"] is True
    for plan in plans:
        assert (plan["q_data_type"], plan["kv_data_type"]) == (torch.bfloat16, torch.float8_e4m3fn)
        # Keys before the query's own.
        assert plan["window_left"] == (-1 if window is None else 6)
        assert plan["logits_soft_cap"] == cap
        assert plan["sm_scale"] == 0.125
        assert plan["page_size"] == 16
