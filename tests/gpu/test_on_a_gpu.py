"""What only a GPU can show: each backend's real kernels, CUDA's graphs, and tokens like those of a CPU.

Skipped where there is no CUDA. The rest of the tests plays all of this without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.gpu.paged import decode_entries, make, shape_of
from bench.gpu.parts import Task, run_here
from bench.gpu.place import QUICK, Place
from bench.gpu.random_model import RandomWeights, random_model
from bench.gpu.steps import step_of
from model_runner.attention import BACKENDS
from model_runner.attention.reference import ReferenceAttention
from model_runner.decode_graphs import DecodeGraphs
from model_runner.device_copies import CudaLane
from model_runner.executor import TorchExecutor
from model_runner.models.decoder import Decoder
from model_runner.sampling_choice import why_wrong
from model_runner.sampling_flashinfer import FlashInferSampler
from model_runner.stream_steps import StreamSteps
from tests.gpu.on_device import OnDevice
from tests.model_runner.attention_cases import CASES, Case
from tests.model_runner.step_modes import StepMode
from tests.model_runner.test_stream_steps import answers, assert_alike, tiny_llama

GPU_BACKENDS = ("flashinfer", "flash_attn", "triton", "reference")
CAPTURABLE = ("flashinfer", "triton")
CUDA = torch.device("cuda")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here")


def skip_unless_there(name: str) -> None:
    reason = BACKENDS[name].why_not_here(CUDA)
    if reason is not None:
        pytest.skip(reason)


def known_cases(name: str) -> list[Case]:
    return [case for case in CASES if BACKENDS[name].why_not_shape(case.shape) is None]


@pytest.mark.parametrize("case", [case for case in CASES if case.types == "float32"][:3], ids=str)
def test_the_table_of_cases_can_be_moved(case: Case) -> None:
    """The only one that needs no GPU: it shows that what the others are made of works."""
    case.check(partial(OnDevice, ReferenceAttention, torch.device("cpu")))


@needs_cuda
@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case}") for name in GPU_BACKENDS for case in known_cases(name)],
)
def test_rows_are_those_of_dense_attention(name: str, case: Case) -> None:
    skip_unless_there(name)
    case.check(partial(OnDevice, BACKENDS[name], CUDA))


@needs_cuda
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_a_backend_is_right_in_all_shapes_that_it_knows(name: str) -> None:
    skip_unless_there(name)
    found = run_here(Task("shapes", name), Place(CUDA, QUICK, 0.001))
    assert found.get("wrong") == {}, found


@needs_cuda
@pytest.mark.parametrize("name", CAPTURABLE)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_captured_step_draws_what_a_plain_one_draws(name: str, batch: int) -> None:
    skip_unless_there(name)
    place = Place(CUDA, replace(QUICK, dtype=torch.bfloat16), 0.001)
    model = random_model(QUICK.model, torch.bfloat16, CUDA).model
    assert isinstance(model, Decoder)
    entries = decode_entries(place, batch, QUICK.context)
    drawn = []
    for captured in (False, True):
        backend = make(name, shape_of(place, 1 + 3 * batch))
        graphs = DecodeGraphs(model, backend, batch, 3) if captured else None
        step = step_of(TorchExecutor(model, backend, place.block_size, CUDA, graphs), entries)
        drawn.append([step() for _ in range(3)])
    assert drawn[0] == drawn[1]


@needs_cuda
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_tokens_are_those_of_a_cpu(name: str) -> None:
    skip_unless_there(name)
    if BACKENDS[name].why_not_shape(shape_of(Place(CUDA, QUICK, 0.001), 2)) is not None:
        pytest.skip(f"{name} does not know float32")
    drawn = []
    cpu = torch.device("cpu")
    for kind, device in (("reference", cpu), (name, CUDA)):
        place = Place(device, QUICK, 0.001)
        # Drawn on the CPU for both: from one seed each device draws numbers of its own.
        model = Decoder(QUICK.model, RandomWeights(QUICK.model, QUICK.dtype, cpu), QUICK.dtype, device)
        backend = make(kind, shape_of(place, 1 + 3 * 4))
        entries = decode_entries(place, 4, QUICK.context)
        drawn.append(step_of(TorchExecutor(model, backend, place.block_size, device), entries)())
    assert drawn[0] == drawn[1]


@needs_cuda
@pytest.mark.parametrize("vocabulary", [1000, 32_000, 128_256, 151_936])
def test_the_draws_of_flashinfer_are_right(vocabulary: int) -> None:
    skip_unless_there("flashinfer")
    assert why_wrong(FlashInferSampler(), CUDA, vocabulary) is None


@needs_cuda
def test_steps_in_the_stream_answer_as_plain_ones() -> None:
    tiny_models = Path(__file__).parent.parent / "data" / "tiny"
    model = tiny_llama(tiny_models, CUDA)
    plain = answers(model, StepMode.SYNC, device=CUDA)
    streamed = answers(model, StepMode.AHEAD, lambda executor: StreamSteps(executor, CudaLane(CUDA)), CUDA)
    assert_alike(plain, streamed)
