"""The parts of the measure for GPUs on a card that is not there: whether they run, with graphs too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu.parts import Task, run_here
from bench.gpu.place import QUICK, TINY, Place
from bench.gpu.random_model import random_model
from bench.gpu.serving import setup_of
from model_runner.batch import BatchEntry
from model_runner.stream_steps import StreamSteps
from tests.model_runner.fake_card import CARD, why_not
from tests.model_runner.fake_cuda import CudaCard
from tests.model_runner.test_steps_on_a_card import Kernels

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PLACE = Place(CARD, replace(QUICK, batches=(3,), context=20, prefill=20), 0.001)


class OnCpuDrawn:
    """torch, but that random numbers for any device are drawn on the CPU: this build has generators for no other."""

    def __getattr__(self, name: str) -> Any:
        return (lambda device: torch.Generator()) if name == "Generator" else getattr(torch, name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCard]:
    name = "model_runner.attention.triton_kernels"
    properties = SimpleNamespace(name="none", major=9, minor=0, total_memory=1 << 34, multi_processor_count=132)
    with CudaCard() as card:
        monkeypatch.setitem(sys.modules, name, Kernels(__import__(name, fromlist=[""]), card))
        for module in ("paged", "random_model"):
            monkeypatch.setattr(f"bench.gpu.{module}.torch", OnCpuDrawn())
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        yield card


@pytest.mark.parametrize(
    ("part", "backend"),
    [("facts", ""), ("speeds", ""), ("correctness", "triton"), ("attention", "triton"), ("steps", "triton")],
)
def test_a_part(card: CudaCard, part: str, backend: str) -> None:
    figures: dict[str, Any] = run_here(Task(part, backend), PLACE)
    assert "failed" not in figures, figures
    if part == "steps":
        assert figures["3"]["ms_graphs"] > 0, figures
        assert card.replays > 3
    if part == "correctness":
        assert figures == {"ok": True, "right": 1, "refused": {}, "wrong": {}}


def test_what_serves_has_graphs_and_steps_in_the_stream(card: CudaCard) -> None:
    loaded = random_model(TINY, torch.float32, CARD)
    setup = setup_of(PLACE, loaded, "triton", 20, 3)
    assert isinstance(setup.steps(), StreamSteps)
    replays = card.replays
    setup.executor.execute([BatchEntry([5], 3, [1], 1)], [])
    assert card.replays == replays + 1
