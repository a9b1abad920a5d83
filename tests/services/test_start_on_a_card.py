"""A whole start with --device cuda on a card that is not there: what is chosen, said, captured and computed first."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from bench.gpu.place import TINY
from bench.gpu.random_model import RandomWeights
from model_runner.attention import AttentionBackend, flashinfer
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.triton import TritonAttention
from model_runner.batch import BatchEntry
from model_runner.draws import Draws
from model_runner.executor import TorchExecutor
from model_runner.models.decoder import Decoder
from model_runner.request import SamplingParams
from model_runner.sampling_rows import SamplingRows
from model_runner.steps import StepOrder
from model_runner.stream_steps import StreamSteps
from model_runner.weights import SafetensorsWeights
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.model_setup import Setup, set_up_model
from tests.model_runner import gpu_doubles
from tests.model_runner.fake_card import CPU, why_not
from tests.model_runner.fake_cuda import CudaCard
from tests.model_runner.test_device_copies import SlowLane
from tests.model_runner.test_steps_on_a_card import Kernels, api_on

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

MIB = 1 << 20
TOTAL = 256 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with heads of 64 dimensions, in float32."""
    folder: Path = tmp_path_factory.mktemp("tiny64")
    c = TINY
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": 128,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    weights = RandomWeights(c, torch.float32, CPU)
    save_file({name: weights.load(name) for name in weights.names()}, folder / "model.safetensors")
    Backend(WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaCard]:
    """One without FlashInfer; Triton's kernels are launched on it."""
    with CudaCard(TOTAL) as card:
        name = "model_runner.attention.triton_kernels"
        monkeypatch.setitem(sys.modules, name, Kernels(__import__(name, fromlist=[""]), card))
        yield card


@pytest.fixture
def with_flashinfer(card: CudaCard, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its double, as a package that can be imported."""
    package: Any = ModuleType("flashinfer")
    package.__spec__ = ModuleSpec("flashinfer", None)
    package.__dict__.update(vars(api_on(card)))
    for name in ("merge_state", "sampling_from_probs", "top_p_renorm_probs"):
        setattr(package, name, card.kernel(getattr(gpu_doubles.flashinfer, name)))
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setattr(FlashInferAttention.__init__, "__defaults__", (None, 16 * MIB))
    flashinfer._import_error.cache_clear()
    yield
    flashinfer._import_error.cache_clear()


def started(model: Path, **given: Any) -> Setup:
    sizes = {"block_size": 8, "max_sequences": 4, "max_batched_tokens": 16} | given
    return set_up_model(ModelRunnerSettings(log_format="console", device="cuda", model=str(model), **sizes))


def log_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = [line.split(": ", 1) for line in capsys.readouterr().err.splitlines() if ": " in line]
    return dict(lines)


def order_of(entries: list[BatchEntry]) -> StepOrder:
    count = len(entries)
    rows = SamplingRows.of([SamplingParams(temperature=0.8, top_p=0.9, seed=4)] * count, [4] * count, range(count))
    return StepOrder(entries, [], Draws(range(count), rows, None, [2] * count))


def first_steps(steps: Any) -> list[list[int]]:
    """What a prompt and three steps of two tokens draw, each launched before the one before it has landed."""
    tables = [[3, 5], [4]]
    order = order_of([BatchEntry(list(range(2, 11)), 0, tables[0], 1), BatchEntry([7, 8], 0, tables[1], 1)])
    launched, drawn = steps.launch(order, None), []
    for more in range(3):
        entries = [BatchEntry([0], first + more, tables[row], 1, follows=row) for row, first in enumerate((9, 2))]
        before, launched = launched, steps.launch(order_of(entries), launched)
        drawn.append(before.wait().drawn.token_ids)
    return [*drawn, launched.wait().drawn.token_ids]


def on_a_cpu(model: Path, setup: Setup) -> TorchExecutor:
    """The same model and backend, without a card."""
    dtype = setup.backend.shape.query_dtype
    twin = Decoder(setup.loaded.config, SafetensorsWeights(model), dtype, CPU)
    shape = replace(setup.backend.shape, device=CPU, num_blocks=8)
    if setup.backend.name == "flashinfer":
        backend: AttentionBackend = FlashInferAttention(shape, gpu_doubles.flashinfer, workspace_bytes=16)
    else:
        backend = TritonAttention(shape)
        backend._kernels = backend._kernels._real
    return TorchExecutor(twin, backend, 8, CPU)


@pytest.mark.usefixtures("with_flashinfer")
def test_with_flashinfer_in_8_bits(card: CudaCard, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = started(model, kv_dtype="fp8_e4m3", kv_scales="none")
    log = log_of(capsys)
    assert "weights bfloat16, activations bfloat16, K/V float8_e4m3fn, flashinfer attention on cuda:0, " in log["model"]
    assert log["attention"] == "flashinfer (before flash_attn, triton, reference)"
    assert log["cuda graphs"] == "on: 3 sizes of decode steps, up to 4 sequences"
    assert log["sampling"] == "flashinfer for requests with neither seed nor top_k; else octavo's own"
    assert log["async steps"] == "on"
    assert log["kv of a token"] == "2 (K, V) x 2 KV heads x 64 x 1 B = 256 B a layer; x 2 layers = 512 B"
    blocks = setup.options.facts.num_blocks
    assert log["kv cache"].startswith(f"{blocks:,} blocks = ")
    assert setup.backend.cache_bytes == blocks * 4096
    steps, replays = setup.steps(), card.replays
    assert isinstance(steps, StreamSteps)
    torch.cuda.reset_peak_memory_stats()
    drawn = first_steps(steps)
    # K/V got what the largest step leaves of nine tenths, and no step takes more.
    assert 0.9 * TOTAL - MIB < card.most_bytes <= 0.9 * TOTAL
    assert card.replays == replays + 3
    assert drawn == first_steps(StreamSteps(on_a_cpu(model, setup), SlowLane()))


def test_without_flashinfer(card: CudaCard, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = started(model, num_blocks=40)
    log = log_of(capsys)
    assert log["attention"].startswith("triton (not flashinfer: it is not installed (pip install 'octavo[gpu]'); not ")
    assert log["cuda graphs"].startswith("on: 3 sizes")
    assert log["sampling"] == "octavo's own (not flashinfer: it is not installed (pip install 'octavo[gpu]'))"
    assert log["kv of a token"] == "2 (K, V) x 2 KV heads x 64 x 2 B = 512 B a layer; x 2 layers = 1,024 B"
    assert log["kv cache"] == "40 blocks = 320 KiB, of which 39 usable hold 312 tokens"
    assert first_steps(setup.steps()) == first_steps(StreamSteps(on_a_cpu(model, setup), SlowLane()))


def test_a_gpu_without_bfloat16(
    card: CudaCard, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turing has float16, and neither our kernels in Triton nor their graphs."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    started(model, num_blocks=40)
    log = log_of(capsys)
    assert "weights float16, activations float16, K/V float16, reference attention on cuda:0, " in log["model"]
    assert "; not triton: the GPU is sm75, below sm80)" in log["attention"]
    assert log["cuda graphs"] == "off: reference attention reads what a graph would not see"


class TestTooLittleMemory:
    """One sentence with the numbers, by each of the ways to say how much there is. 8 KiB a block, of 8 tokens."""

    @pytest.mark.parametrize("given", [{"num_blocks": 40_000}, {"kv_cache_memory": 40_000 * 8192}])
    def test_for_what_was_asked_for(self, card: CudaCard, model: Path, given: dict[str, int]) -> None:
        with pytest.raises(StartupError) as raised:
            started(model, attention_backend="reference", **given)
        assert re.fullmatch(
            r"No memory for 40000 KV blocks of 8 KiB each, 312\.5 MiB in all, where 255\.\d MiB of 256 MiB are free; "
            r"give fewer by --num-blocks or --kv-cache-memory\.",
            str(raised.value),
        )

    def test_for_any_block(self, card: CudaCard, model: Path) -> None:
        with pytest.raises(StartupError) as raised:
            started(model, attention_backend="reference", gpu_memory_utilization=0.0004)
        assert re.fullmatch(
            r"--gpu-memory-utilization 0\.0004 leaves 0 Bytes for K/V, less than two blocks of 8 KiB: of 256 MiB the "
            r"weights and the largest step take \S+ [KM]iB and others 0 Bytes; raise it, or lower --max-batched-tokens "
            r"or --max-sequences\.",
            str(raised.value),
        )

    def test_for_the_largest_step(self, model: Path) -> None:
        with CudaCard(total_bytes=600_000), pytest.raises(StartupError) as raised:
            started(model, attention_backend="reference", max_batched_tokens=512)
        assert re.fullmatch(
            r"A step of 512 tokens in 4 sequences does not fit beside the weights: \S+ KiB of 585\.9 KiB are free; "
            r"lower --max-batched-tokens or --max-sequences\.",
            str(raised.value),
        )

    def test_for_the_weights(self, model: Path) -> None:
        with CudaCard(total_bytes=100_000), pytest.raises(StartupError) as raised:
            started(model)
        assert re.fullmatch(
            rf"The weights of {model} do not fit cuda:0, where \S+ KiB of 97\.66 KiB are free\.", str(raised.value)
        )
