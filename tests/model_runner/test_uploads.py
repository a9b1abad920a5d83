"""All that steps copy from the host to a GPU goes from page-locked memory, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder
from model_runner.device_copies import CudaLane
from model_runner.draws import Draws
from model_runner.logit_edits import LogitEdits, mask_of
from model_runner.request import SamplingParams
from model_runner.sampling import logprobs
from model_runner.sampling_flashinfer import FlashInferSampler
from model_runner.sampling_rows import SamplingRows
from model_runner.steps import StepOrder
from model_runner.stream_steps import StreamSteps
from tests.model_runner import gpu_doubles
from tests.model_runner.fake_card import CARD, why_not
from tests.model_runner.fake_cuda import CudaCard
from tests.model_runner.test_steps_on_a_card import Rig, api_on

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

KINDS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, top_k=5, seed=1),
    SamplingParams(temperature=0.8, top_p=0.7, min_p=0.05, seed=1),
    SamplingParams(temperature=0.8, top_p=0.7, min_p=0.05),
]
EDITS = LogitEdits(
    repetition=1.2,
    seen=np.array([3, 4], dtype=np.int32),
    counts=np.array([0, 2], dtype=np.int32),
    biased=np.array([5], dtype=np.int32),
    biases=np.array([1.5], dtype=np.float32),
    banned=np.array([6], dtype=np.int32),
    mask=mask_of(range(40), 64),
)
I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64


@pytest.fixture
def card() -> Iterator[CudaCard]:
    with CudaCard() as card:
        yield card


def draws_of(count: int) -> Draws:
    kinds = KINDS[:count]
    return Draws(range(count), SamplingRows.of(kinds, [1] * count, [0] * count), None, [2] * count)


def steps_of(rig: Rig, card: CudaCard) -> StreamSteps:
    names = ("sampling_from_probs", "top_p_renorm_probs")
    api = api_on(card)
    vars(api).update({name: card.kernel(getattr(gpu_doubles.flashinfer, name)) for name in names})
    return StreamSteps(rig.executor, CudaLane(CARD), FlashInferSampler(api))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "dtype", "graphs"),
    [
        ("reference", torch.float32, False),
        ("triton", torch.float32, False),
        ("flashinfer", torch.float16, False),
        ("flashinfer", torch.float16, True),
    ],
)
def test_every_copy_of_every_kind_of_step(card: CudaCard, name: str, dtype: torch.dtype, graphs: bool) -> None:
    rig = Rig(name, dtype, card, graphs)
    steps = steps_of(rig, card)
    card.uploads.clear()
    # Prompts; single tokens that follow what those drew, behind copies; a prompt among single tokens.
    prompts = [BatchEntry([1, 2, 3, 4, 5 + row], 0, [1 + row], 1) for row in range(4)]
    first = steps.launch(StepOrder(prompts, [], draws_of(4)), None)
    tokens = [BatchEntry([0], 5, [1 + row], 1, follows=row) for row in range(4)]
    second = steps.launch(StepOrder(tokens, [CopyOrder(1, 9, 3), CopyOrder(2, 10, 3)], draws_of(4)), first)
    first.wait()
    mixed = [BatchEntry([0], 6, [1], 1, follows=0), BatchEntry([1, 2, 3], 0, [8], 1)]
    steps.launch(StepOrder(mixed, [], draws_of(2)), second).wait()
    # Draws of the engine, with edits; and log-probabilities of a prompt.
    logits = steps.launch(StepOrder([replace(each, num_logits=5) for each in prompts], [], None), None).wait().logits
    replace(draws_of(4), source=[4, 9, 14, 19], edits=[EDITS] * 4).draw(logits)
    logprobs(logits, torch.tensor([1, 2, 3]), [1, 1, 1], [0, 1, 2])
    awaited = [(shape, kind) for shape, kind, is_async in card.uploads if not is_async]
    assert awaited == []
    # Some of what there must be: what was packed, followers, penalties, masks, uniform numbers, rows to draw from.
    kinds = {(len(shape), kind) for shape, kind, _ in card.uploads}
    assert {(1, torch.uint8), (1, I64), (1, F32), (1, F64), (2, I32)} <= kinds
    assert len(card.uploads) > 40
