"""What is run to see how much memory steps take: all kinds of them, on a card that is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu.place import TINY
from model_runner.device_copies import CudaLane
from model_runner.device_memory import CudaDevice, measure
from model_runner.draws import Draws
from model_runner.largest_step import StepBounds, largest_entries, run_largest_step
from model_runner.logit_edits import LogitEdits, apply_edits
from model_runner.request import MAX_LOGPROBS, SamplingParams
from model_runner.sampling_flashinfer import FlashInferSampler
from model_runner.sampling_rows import SamplingRows
from model_runner.steps import Launched, StepOrder
from model_runner.stream_steps import StreamSteps
from tests.model_runner import gpu_doubles
from tests.model_runner.fake_card import CARD, why_not
from tests.model_runner.fake_cuda import CudaCard
from tests.model_runner.test_steps_on_a_card import Rig

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

VOCABULARY = 1500
SEQUENCES = 6
BOUNDS = StepBounds(tokens=SEQUENCES, sequences=SEQUENCES, block_size=8, longest=104)
"""Steps of single tokens: of others the log-probabilities of prompts take the most."""


@pytest.fixture
def card() -> Iterator[CudaCard]:
    with CudaCard() as card:
        yield card


def rig_on(card: CudaCard) -> Rig:
    return Rig("reference", torch.float32, card, False, replace(TINY, vocab_size=VOCABULARY))


def sampler_on(card: CudaCard) -> FlashInferSampler:
    names = ("sampling_from_probs", "top_p_renorm_probs")
    kernels = {name: card.kernel(getattr(gpu_doubles.flashinfer, name)) for name in names}
    return FlashInferSampler(SimpleNamespace(**kernels))


def order_of(sampling: SamplingParams) -> StepOrder:
    rows = SamplingRows.of([sampling] * SEQUENCES, [1] * SEQUENCES, [0] * SEQUENCES)
    draws = Draws(range(SEQUENCES), rows, None, [MAX_LOGPROBS] * SEQUENCES)
    return StepOrder(largest_entries(BOUNDS, all_logits=False), [], draws)


def two_in_flight(rig: Rig, sampler: FlashInferSampler, sampling: SamplingParams) -> None:
    steps = StreamSteps(rig.executor, CudaLane(CARD), sampler)
    before: Launched | None = None
    for _ in range(3):
        launched = steps.launch(order_of(sampling), before)
        if before is not None:
            before.wait()
        before = launched


def ruled(rig: Rig) -> None:
    """Draws that the engine makes, with penalties."""
    edits = LogitEdits(repetition=1.5, seen=torch.arange(100).int().numpy(), counts=torch.ones(100).int().numpy())
    order = order_of(SamplingParams(temperature=2.0, top_p=0.9, seed=3))
    draws = replace(order.draws, edits=[edits] * SEQUENCES)
    draws.draw(rig.executor.execute(order.entries, []))


@torch.inference_mode()
@pytest.mark.parametrize(
    "steps",
    [
        lambda rig, sampler: two_in_flight(rig, sampler, SamplingParams(temperature=1.0, top_p=0.9, seed=1)),
        lambda rig, sampler: two_in_flight(rig, sampler, SamplingParams(temperature=1.0, top_p=0.9, min_p=0.01)),
        lambda rig, sampler: ruled(rig),
    ],
)
def test_no_kind_of_step_takes_more(card: CudaCard, steps: Callable[[Rig, FlashInferSampler], None]) -> None:
    rig, sampler = rig_on(card), sampler_on(card)
    bounds = replace(BOUNDS, sampler=sampler)
    memory = measure(CudaDevice(CARD), partial(run_largest_step, rig.executor, CudaLane(CARD), bounds))
    torch.cuda.reset_peak_memory_stats(CARD)
    steps(rig, sampler)
    assert card.most_bytes <= memory.most


@torch.inference_mode()
@pytest.mark.parametrize(
    ("runs_ahead", "has_sampler", "guesses"), [(True, True, 0), (True, False, 0), (False, True, 2)]
)
def test_each_kind_is_run(card: CudaCard, runs_ahead: bool, has_sampler: bool, guesses: int) -> None:
    """Draws with edits always, two steps in flight where steps are, and the sampler's own draws where it was chosen."""
    rig, sampler = rig_on(card), sampler_on(card)
    bounds = StepBounds(20, SEQUENCES, 8, 104, guesses, runs_ahead, sampler if has_sampler else None)
    in_flight: list[bool] = []
    launch = StreamSteps.launch

    def noted(self: StreamSteps, order: StepOrder, before: Any) -> Launched:
        in_flight.append(before is not None)
        return launch(self, order, before)

    with (
        mock.patch("model_runner.sampling.apply_edits", side_effect=apply_edits) as edited,
        mock.patch.object(sampler, "draw", side_effect=sampler.draw) as theirs,
        mock.patch.object(StreamSteps, "launch", noted),
    ):
        run_largest_step(rig.executor, CudaLane(CARD), bounds)
    ((logits, edits), _) = edited.call_args
    assert len(logits) == len(edits) == SEQUENCES * (1 + guesses)
    assert len(edits[0].seen) == 104
    assert in_flight == runs_ahead * (1 + has_sampler) * [False, True]
    assert [len(call.args[0]) for call in theirs.call_args_list] == [SEQUENCES] * (2 * runs_ahead * has_sampler)
