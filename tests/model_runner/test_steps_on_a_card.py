"""Whole engines on a card that is not there (fake_card.py): what steps draw, and that no launch waits for anything.

Each step that was launched is computed again on the CPU, with the tokens that the one before drew. The batches are the
same and so are the sums, so that logits must be the same bit by bit, and draws too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench.gpu.place import TINY
from bench.gpu.random_model import RandomWeights
from model_runner.attention import AttentionBackend, AttentionShape, flashinfer
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.nhd import GpuAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.attention.triton import TritonAttention
from model_runner.config import ModelConfig
from model_runner.decode_graphs import CudaCapture, DecodeGraphs
from model_runner.device_copies import CudaLane
from model_runner.device_memory import CudaDevice, measure
from model_runner.executor import TorchExecutor
from model_runner.kv_scales import KvScales
from model_runner.largest_step import StepBounds, run_largest_step
from model_runner.models.decoder import Decoder
from model_runner.sampling_flashinfer import FlashInferSampler
from model_runner.steps import InlineSteps, Launched, StepOrder, StepResult, Steps
from model_runner.stream_steps import StreamSteps
from tests.model_runner import gpu_doubles
from tests.model_runner.fake_card import CARD, CPU, Card, CardTensor, why_not
from tests.model_runner.fake_cuda import CudaCard
from tests.model_runner.step_modes import StepMode
from tests.model_runner.test_async_steps import Load, drawn_load, play
from tests.model_runner.test_device_copies import SlowLane

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

BLOCK_SIZE = 8
NUM_BLOCKS = 14
MAX_SEQUENCES = 6
BATCHED_TOKENS = 24


class Recorded:
    """Steps whose launches may not wait, with what came of each."""

    def __init__(self, steps: StreamSteps, card: Card) -> None:
        self._steps = steps
        self._card = card
        self.all: list[_Recorded] = []
        self.found: list[Exception] = []

    def launch(self, order: StepOrder, before: _Recorded | None) -> Launched:
        try:
            with self._card.nobody_waits():
                launched = self._steps.launch(order, None if before is None else before.launched)
        except Exception as error:
            # An engine goes on after a step that fails.
            self.found.append(error)
            raise
        self.all.append(_Recorded(launched, order, before, self._card, self._card.moment))
        return self.all[-1]

    def close(self) -> None:
        self._steps.close()


@dataclass(eq=False)
class _Recorded:
    launched: Launched
    order: StepOrder
    before: _Recorded | None
    card: Card
    end: int
    result: StepResult | None = None
    logits: Tensor | None = None

    def wait(self) -> StepResult:
        self.result = self.launched.wait()
        # Without draws nobody waits here. The engine takes it for done, so that it may be waited for later.
        self.card.may_wait_for(self.end)
        if self.order.draws is None:
            self.logits = self.result.logits.cpu()
        return self.result


class Kernels:
    """Triton's, launched on what the card holds."""

    def __init__(self, real: Any, card: Card) -> None:
        self._real, self._card = real, card

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        return _Launcher(real, self._card) if name in ("attend", "merge", "write", "copy_blocks") else real


class _Launcher:
    def __init__(self, real: Any, card: Card) -> None:
        self._real, self._card = real, card

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self._card.kernel(self._real[grid])


def api_on(card: Card) -> SimpleNamespace:
    """The double of FlashInfer on what the card holds. Its plans take offsets on the host, and pages on the card, and
    copy all of them to the card."""

    def wrapper(kind: Any) -> Any:
        def make(workspace: Tensor, layout: str, **options: Any) -> SimpleNamespace:
            made = card.kernel(lambda *args, **kwargs: kind(*args, layout, **kwargs))(workspace, **options)
            return SimpleNamespace(plan=plan_of(made), run=card.kernel(made.run))

        return make

    def plan_of(made: Any) -> Callable[..., None]:
        def plan(*args: Any, **options: Any) -> None:
            tensors = [each for each in args if isinstance(each, Tensor)]
            on_card = [isinstance(each, CardTensor) for each in tensors]
            # [query_indptr,] indptr, indices, last_page_len
            assert on_card == [False] * (len(tensors) - 2) + [True, False], (
                "offsets belong on the host, pages on the GPU"
            )
            for each in tensors:
                each.to(CARD, non_blocking=True)
            made.plan(*[each.held if isinstance(each, CardTensor) else each for each in args], **options)

        return plan

    return SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=wrapper(gpu_doubles.flashinfer.BatchDecodeWithPagedKVCacheWrapper),
        BatchPrefillWithPagedKVCacheWrapper=wrapper(gpu_doubles.flashinfer.BatchPrefillWithPagedKVCacheWrapper),
        append_paged_kv_cache=card.kernel(gpu_doubles.flashinfer.append_paged_kv_cache),
        merge_state=card.kernel(gpu_doubles.flashinfer.merge_state),
    )


class Rig:
    """A small Llama with a backend, on a device."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        card: Card | None,
        graphs: bool,
        config: ModelConfig = TINY,
        scales: KvScales | None = None,
    ) -> None:
        """scales: of K/V in 8 bits."""
        device = CPU if card is None else CARD
        self.shape = AttentionShape(
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            BLOCK_SIZE,
            NUM_BLOCKS,
            dtype if scales is None else torch.float8_e4m3fn,
            device,
            scales=scales,
            query_dtype=dtype,
        )
        model = Decoder(config, RandomWeights(config, dtype, CPU), dtype, device)
        backend = _backend(name, self.shape, card)
        capture = _played_again if card is None else CudaCapture()
        made = DecodeGraphs(model, backend, MAX_SEQUENCES, NUM_BLOCKS, capture) if graphs else None
        self.backend: Any = backend
        self.executor = TorchExecutor(model, backend, BLOCK_SIZE, device, made)
        self.executor.capture_graphs()
        if card is not None:
            torch.cuda.synchronize(CARD)


def _played_again(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A graph's size is that of a batch with padding, which the twin must have too."""
    return compute


def _backend(name: str, shape: AttentionShape, card: Card | None) -> AttentionBackend:
    if name == "reference":
        return ReferenceAttention(shape)
    backend: GpuAttention
    if name == "flashinfer":
        api = gpu_doubles.flashinfer if card is None else api_on(card)
        backend = FlashInferAttention(shape, api, workspace_bytes=16)
    else:
        backend = TritonAttention(shape)
    if card is not None:
        backend._kernels = Kernels(backend._kernels, card)
    return backend


@pytest.fixture
def card() -> Iterator[CudaCard]:
    with CudaCard() as card:
        yield card


def recorded(rig: Rig, card: Card, requests: int) -> list[_Recorded]:
    """All steps of a drawn load."""
    steps = Recorded(StreamSteps(rig.executor, CudaLane(CARD)), card)
    played(rig, drawn_load(1, requests), steps)
    assert not steps.found, steps.found[0]
    return steps.all


def played(rig: Rig, load: Load, steps: Steps) -> None:
    """A load to its end; the blocks are too few for all at a time."""
    play(
        load,
        StepMode.AHEAD,
        steps=steps,
        executor=rig.executor,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_sequences=MAX_SEQUENCES,
        max_batched_tokens=BATCHED_TOKENS,
    )


@torch.inference_mode()
def assert_same_on_a_cpu(steps: Sequence[_Recorded], twin: Steps) -> None:
    """Computes the steps again."""
    launched: dict[_Recorded, Launched] = {}
    for step in steps:
        order = step.order
        launched[step] = twin.launch(order, None if step.before is None else launched[step.before])
        expected = launched[step].wait()
        if step.logits is not None:
            assert torch.equal(step.logits, expected.logits)
        if expected.drawn is not None and step.result is not None:
            got = step.result.drawn
            assert got is not None
            assert got.token_ids == expected.drawn.token_ids
            for one, other in zip(got.positions, expected.drawn.positions, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    assert one.token_id == other.token_id
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-6)
                    assert [token for token, _ in one.top] == [token for token, _ in other.top]


CASES = [
    ("reference", torch.float32, False),
    ("reference", torch.bfloat16, False),
    ("triton", torch.float16, False),
    ("triton", torch.float32, True),
    ("flashinfer", torch.float16, False),
    ("flashinfer", torch.bfloat16, True),
]


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize(("name", "dtype", "graphs"), CASES)
def test_a_load(card: Card, name: str, dtype: torch.dtype, graphs: bool) -> None:
    steps = recorded(Rig(name, dtype, card, graphs), card, 3 if name == "triton" else 6)
    assert any(step.order.draws is None for step in steps)
    assert any(step.before is not None and step.order.draws is not None for step in steps)
    assert_same_on_a_cpu(steps, InlineSteps(Rig(name, dtype, None, graphs).executor))


@pytest.mark.usefixtures("no_foresight")
def test_a_load_with_all_of_flashinfer(card: CudaCard, monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V of 8 bits with scales, prefixes that are read once for two sequences and more, and its own draws."""
    monkeypatch.setattr(flashinfer, "CASCADE_TOKENS", BLOCK_SIZE)
    monkeypatch.setattr(flashinfer, "CASCADE_SEQUENCES", 2)
    scales = KvScales((0.05, 0.3), (0.02, 0.4))
    rig = Rig("flashinfer", torch.float16, card, False, scales=scales)
    api = rig.backend._api
    api.merge_state = mock.Mock(side_effect=api.merge_state)
    sampler = sampler_of(card.kernel)
    monkeypatch.setattr(sampler, "draw", mock.Mock(side_effect=sampler.draw))
    steps = Recorded(StreamSteps(rig.executor, CudaLane(CARD), sampler), card)
    played(rig, seedless(drawn_load(1, 5)), steps)
    assert not steps.found, steps.found[0]
    assert api.merge_state.call_count > 4
    assert sampler.draw.call_count > 4
    twin = Rig("flashinfer", torch.float16, None, False, scales=scales)
    assert_same_on_a_cpu(steps.all, StreamSteps(twin.executor, SlowLane(), sampler_of(lambda function: function)))


def sampler_of(kernel: Callable[[Any], Any]) -> FlashInferSampler:
    """FlashInfer's draws by its double, whose seeds are counted."""
    names = ("sampling_from_probs", "top_p_renorm_probs")
    kernels = {name: kernel(getattr(gpu_doubles.flashinfer, name)) for name in names}
    return FlashInferSampler(SimpleNamespace(**kernels), count(1).__next__)


def seedless(load: Load) -> Load:
    """The same, but that every second request has no seed and a temperature."""
    for place, (turn, request) in enumerate(load.requests):
        if place % 2 and request.beam_search is None:
            sampling = replace(request.sampling, seed=None, temperature=1.0)
            load.requests[place] = turn, replace(request, sampling=sampling)
    return load


@pytest.mark.usefixtures("no_foresight")
def test_no_step_takes_more_memory_than_the_largest(card: Card) -> None:
    """Two steps in flight, nuclei, log-probabilities of answers and of prompts are within what start measures."""
    rig = Rig("reference", torch.float32, card, False, replace(TINY, vocab_size=2048))
    bounds = StepBounds(BATCHED_TOKENS, MAX_SEQUENCES, BLOCK_SIZE, (NUM_BLOCKS - 1) * BLOCK_SIZE)
    largest = partial(run_largest_step, rig.executor, CudaLane(CARD), bounds)
    memory = measure(CudaDevice(CARD), largest)
    torch.cuda.reset_peak_memory_stats(CARD)
    load = drawn_load(1, 6)
    assert any(request.prompt_logprobs is not None for _, request in load.requests)
    played(rig, load, StreamSteps(rig.executor, CudaLane(CARD)))
    assert card.most_bytes <= memory.most
