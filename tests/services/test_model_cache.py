"""How many blocks a GPU has room for, on a device whose numbers are written down, and what is said when it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.attention.cpu_torch import TorchCpuAttention
from model_runner.config_hf import config_from_hf
from model_runner.device_memory import StepMemory, measure
from model_runner.executor import TorchExecutor
from model_runner.kv_memory import KvMemory
from model_runner.largest_step import NUM_BLOCKS, StepBounds, largest_entries, run_largest_step
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.model_cache import blocks_left, measured_step
from services.model_setup import set_up_model
from tests.model_runner.test_device_copies import SlowLane

GIB = 1 << 30
LLAMA = KvMemory(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2, block_size=16)
"""2 MiB a block."""
TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"
CPU = torch.device("cpu")


class Gpu:
    """24 GiB, of which others have 1. Loaded weights take 6; a step takes `step` more while it runs."""

    def __init__(self, step: int) -> None:
        self._step = step
        # Memory that torch kept from loading, and does not use.
        self._reserved = self._most = 9 * GIB

    def run(self) -> None:
        self._reserved = 6 * GIB + self._step
        self._most = max(self._most, self._reserved)

    def free(self) -> int:
        return self.total() - GIB - self._reserved

    def total(self) -> int:
        return 24 * GIB

    def reserved(self) -> int:
        return self._reserved

    def most_reserved(self) -> int:
        return self._most

    def start_over(self) -> None:
        self._reserved = self._most = 6 * GIB


def settings(**given: Any) -> ModelRunnerSettings:
    return ModelRunnerSettings(log_format="console", device="cpu", **given)


class TestTheLargestStep:
    @pytest.mark.parametrize(
        ("tokens", "sequences", "counts"),
        [(512, 64, [8] * 64), (10, 4, [3, 3, 2, 2]), (3, 64, [1, 1, 1]), (100, 1, [100])],
    )
    def test_all_tokens_in_as_many_sequences_as_there_may_be(
        self, tokens: int, sequences: int, counts: list[int]
    ) -> None:
        bounds = StepBounds(tokens, sequences, 16, 1000)
        for all_logits in (True, False):
            entries = largest_entries(bounds, all_logits=all_logits)
            assert [len(entry.token_ids) for entry in entries] == counts
            assert [entry.num_logits for entry in entries] == (counts if all_logits else [1] * len(counts))

    @pytest.mark.parametrize(("guesses", "draws"), [(0, 4), (3, 16), (4, 20), (5, 20)])
    def test_no_more_draws_than_tokens(self, guesses: int, draws: int) -> None:
        assert StepBounds(20, 4, 16, 1000, guesses).draws == draws

    def test_the_smallest_cache_is_enough(self) -> None:
        """40 tokens of one sequence take five blocks of 8, and there is one."""
        config = config_from_hf(TINY)
        shape = AttentionShape(
            config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, 8, NUM_BLOCKS, torch.float32, CPU
        )
        model = Decoder(config, SafetensorsWeights(TINY), torch.float32, CPU)
        executor = TorchExecutor(model, create_backend("reference", shape), 8, CPU)
        with mock.patch.object(executor, "_compute", wraps=executor._compute) as compute:
            run_largest_step(executor, SlowLane(), StepBounds(83, 2, 8, 256))
        # One that the engine draws from, and two that draw themselves.
        assert [[len(entry.token_ids) for entry in call.args[0]] for call in compute.call_args_list] == [[42, 41]] * 3
        assert [[entry.num_logits for entry in call.args[0]] for call in compute.call_args_list] == [
            *([42, 41], [1, 1], [1, 1])
        ]


class TestWhatIsLeft:
    def test_by_hand(self) -> None:
        """Of 24 GiB nine tenths may be used: 21.6 - 1 of others - 6 of weights - 2 of the step = 12.6 GiB."""
        gpu = Gpu(step=2 * GIB)
        memory = measure(gpu, gpu.run)
        assert memory == StepMemory(total=24 * GIB, others=GIB, most=8 * GIB)
        assert memory.left(0.9) == int(21.6 * GIB) - 9 * GIB
        # In blocks of 2 MiB: 12.6 x 512 = 6,451.2
        assert blocks_left(settings(), LLAMA, memory) == 6_451

    def test_a_step_counts_while_it_runs(self) -> None:
        small, large = Gpu(step=GIB), Gpu(step=5 * GIB)
        assert measure(small, small.run).left(1) - measure(large, large.run).left(1) == 4 * GIB

    def test_the_share_is_a_setting(self) -> None:
        memory = StepMemory(total=24 * GIB, others=GIB, most=8 * GIB)
        assert blocks_left(settings(gpu_memory_utilization=0.5), LLAMA, memory) == 3 * 512

    def test_nothing_is_left(self) -> None:
        memory = StepMemory(total=24 * GIB, others=15 * GIB, most=8 * GIB)
        with pytest.raises(StartupError) as raised:
            blocks_left(settings(), LLAMA, memory)
        assert str(raised.value) == (
            "--gpu-memory-utilization 0.9 leaves 0 Bytes for K/V, less than two blocks of 2 MiB: of 24 GiB the weights "
            "and the largest step take 8 GiB and others 15 GiB; raise it, or lower --max-batched-tokens or "
            "--max-sequences."
        )


class Room:
    """An executor on a device with room for graphs."""

    device = CPU

    def capture_graphs(self) -> None:
        pass


class Full:
    """An executor on a device without room for its graphs."""

    device = CPU

    def capture_graphs(self) -> None:
        run_out()


def run_out(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


class TestTooLittleMemory:
    def test_for_the_largest_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.model_cache.run_largest_step", run_out)
        with pytest.raises(StartupError) as raised:
            measured_step(StepBounds(8192, 256, 16, 1000), Room(), Gpu(0))
        assert str(raised.value) == (
            "A step of 8192 tokens in 256 sequences does not fit beside the weights: 17 GiB of 24 GiB are free; lower "
            "--max-batched-tokens or --max-sequences."
        )

    def test_for_graphs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("services.model_cache.run_largest_step", lambda *_: None)
        with pytest.raises(StartupError, match=r"^A step of 512 tokens in 64 sequences does not fit beside"):
            measured_step(StepBounds(512, 64, 16, 1000), Full(), Gpu(0))

    def test_for_the_cache(self) -> None:
        def none_left(self: TorchCpuAttention, shape: AttentionShape) -> None:
            if shape.num_blocks > NUM_BLOCKS:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            AttentionBackend.__init__(self, shape)

        with (
            mock.patch.object(TorchCpuAttention, "__init__", none_left),
            pytest.raises(StartupError) as raised,
        ):
            set_up_model(settings(num_blocks=1000, attention_backend="cpu_torch"))
        # 2 (K, V) x 30 layers x 3 KV heads x 64 dimensions x 4 bytes x 16 tokens = 720 KiB
        assert str(raised.value) == (
            "No memory for 1000 KV blocks of 720 KiB each, 703.1 MiB in all; give fewer by --num-blocks or "
            "--kv-cache-memory."
        )

    def test_for_attention(self) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory")
        with (
            mock.patch.object(TorchCpuAttention, "__init__", side_effect=error),
            pytest.raises(StartupError, match=r"^No memory for attention beside the weights\.$"),
        ):
            set_up_model(settings(num_blocks=1000, attention_backend="cpu_torch"))

    def test_for_the_weights(self) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory")
        with (
            mock.patch("services.model_setup.load_model", side_effect=error),
            pytest.raises(StartupError, match=r"^The weights of m do not fit cpu\.$"),
        ):
            set_up_model(settings(model="m"))


def test_the_default_on_a_cpu_is_1_gib() -> None:
    setup = set_up_model(settings())
    assert setup.options.facts.num_blocks == GIB // setup.memory.bytes_per_block
