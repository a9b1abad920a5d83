"""Which runners have CUDA graphs, what a start says of them, and that their memory is counted; without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.attention import AttentionShape
from model_runner.attention.reference import ReferenceAttention
from model_runner.batch import BatchEntry, StepBatch
from model_runner.config_hf import config_from_hf
from model_runner.decode_graphs import DecodeGraphs
from model_runner.executor import TorchExecutor
from model_runner.largest_step import StepBounds
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights
from services import graph_setup
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.graph_setup import prepared_executor, why_no_graphs
from services.model_cache import measured_step

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
CPU = torch.device("cpu")
GIB = 1 << 30
BOUNDS = StepBounds(512, 5, 8, 24)


class Capturable(ReferenceAttention):
    name = "capturable"
    is_capturable = True

    def plan_replay(self, batch: StepBatch) -> None:
        self.plan(batch)


def settings(**given: Any) -> ModelRunnerSettings:
    return ModelRunnerSettings(log_format="console", device="cpu", max_sequences=5, block_size=8, **given)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(config_from_hf(TINY), SafetensorsWeights(TINY), torch.float32, CPU)


@pytest.fixture
def backend() -> Capturable:
    config = config_from_hf(TINY)
    sizes = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    return Capturable(AttentionShape(*sizes, 8, 4, torch.float32, CPU))


class TestWhyNot:
    @pytest.mark.parametrize(
        ("given", "device", "is_capturable", "reason"),
        [
            (None, "cuda", True, None),
            (True, "cuda", True, None),
            (False, "cuda", True, "--no-cuda-graphs"),
            (None, "cpu", True, "the device is cpu"),
            (True, "cpu", True, "the device is cpu"),
            (None, "cuda", False, "flash_attn attention reads what a graph would not see"),
        ],
    )
    def test_by_hand(
        self, model: Decoder, given: bool | None, device: str, is_capturable: bool, reason: str | None
    ) -> None:
        shape = SimpleNamespace(device=torch.device(device))
        backend: Any = SimpleNamespace(shape=shape, is_capturable=is_capturable, name="flash_attn")
        assert why_no_graphs(settings(cuda_graphs=given), model, backend) == reason

    def test_what_cannot_be_had_ends_a_start_that_insists(self, model: Decoder, backend: Capturable) -> None:
        with pytest.raises(StartupError, match=r"^--cuda-graphs cannot be had: the device is cpu\.$"):
            prepared_executor(settings(cuda_graphs=True), model, backend, 24)
        assert prepared_executor(settings(), model, backend, 24).graphs == "off: the device is cpu"


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_setup, "why_no_graphs", lambda *_: None)


class Capture:
    """Captures nothing and computes anew. sizes: those that were captured."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sizes: list[int] = []
        self._error = error

    def __call__(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self._error is not None:
            raise self._error
        self.sizes.append(len(compute()))
        return compute


@pytest.mark.usefixtures("on_a_gpu")
class TestCapture:
    def test_all_sizes_before_the_first_request_the_largest_first(self, model: Decoder, backend: Capturable) -> None:
        """Five sequences are padded to eight."""
        capture = Capture()
        prepared = prepared_executor(settings(), model, backend, 24, capture)
        assert capture.sizes == [8, 4, 2, 1]
        assert prepared.graphs == "on: 4 sizes of decode steps, up to 8 sequences"
        prepared.executor.execute([BatchEntry([1], 0, [1], 1)] * 3, [])
        assert capture.sizes == [8, 4, 2, 1]

    def test_only_the_null_block_is_written(self, model: Decoder, backend: Capturable) -> None:
        prepared_executor(settings(), model, backend, 24, Capture())
        assert backend.keys[:, 0].any()
        assert not backend.keys[:, 1:].any()

    def test_one_that_fails_is_done_without(self, model: Decoder, backend: Capturable) -> None:
        error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        prepared = prepared_executor(settings(), model, backend, 24, Capture(error))
        reason = "their capture failed: RuntimeError: CUDA error: operation not permitted when stream is capturing"
        assert prepared.graphs == f"off: {reason}"
        assert prepared.executor.execute([BatchEntry([1], 0, [1], 1)], []).isfinite().all()
        with pytest.raises(StartupError, match=rf"^--cuda-graphs cannot be had: {reason}\.$"):
            prepared_executor(settings(cuda_graphs=True), model, backend, 24, Capture(error))

    def test_too_little_memory_is_no_reason_to_go_on(self, model: Decoder, backend: Capturable) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory")
        with pytest.raises(StartupError, match=r"^No memory for CUDA graphs beside .* or give --no-cuda-graphs\.$"):
            prepared_executor(settings(), model, backend, 24, Capture(error))


class Gpu:
    """24 GiB. Others have 1, weights 6; a step takes 2 while it runs, a graph 0.5 and of CUDA's own 0.25.

    A capture gives back what torch does not use.
    """

    def __init__(self) -> None:
        self._graphs = 0
        self._step = 0.0
        self._most = 0

    def step(self) -> None:
        self._step = 2.0
        self._most = max(self._most, self.reserved())

    def capture(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self._step = 0.0
        self._graphs += 1
        self._most = max(self._most, self.reserved())
        return compute

    def free(self) -> int:
        return self.total() - self.reserved() - int((1 + 0.25 * self._graphs) * GIB)

    def total(self) -> int:
        return 24 * GIB

    def reserved(self) -> int:
        return int((6 + self._step + 0.5 * self._graphs) * GIB)

    def most_reserved(self) -> int:
        return self._most

    def start_over(self) -> None:
        self._step = 0.0
        self._most = self.reserved()


def test_graphs_are_counted_beside_the_largest_step(
    model: Decoder, backend: Capturable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four graphs: 6 + 2 + 4 x 0.5 of torch's, and 1 + 4 x 0.25 of others and of CUDA's own."""
    gpu = Gpu()
    graphs = DecodeGraphs(model, backend, 5, 3, gpu.capture)
    executor = TorchExecutor(model, backend, 8, CPU, graphs)
    monkeypatch.setattr("services.model_cache.run_largest_step", lambda *_: gpu.step())
    memory = measured_step(BOUNDS, executor, gpu)
    assert (memory.most, memory.others) == (10 * GIB, 2 * GIB)


def test_a_graph_that_fails_is_not_counted_and_ends_nothing(
    model: Decoder, backend: Capturable, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    graphs = DecodeGraphs(model, backend, 5, 3, Capture(RuntimeError("no")))
    executor = TorchExecutor(model, backend, 8, CPU, graphs)
    monkeypatch.setattr("services.model_cache.run_largest_step", lambda *_: gpu.step())
    assert measured_step(BOUNDS, executor, gpu).most == 8 * GIB
