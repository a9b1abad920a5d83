"""What a start promises of a model: the same bits in any batch, or a sentence that says why not."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch

from model_runner.sampling_choice import SamplerChoice
from model_runner.steps import InlineSteps, WorkerSteps
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.model_setup import _choose_sampler, set_up_model
from tests.model_runner.native_support import INSTRUCTION_SETS

needs_kernels = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")


def settings(**given: Any) -> ModelRunnerSettings:
    return ModelRunnerSettings(log_format="console", num_blocks=4, device="cpu", **given)


@needs_kernels
def test_the_kernels_promise_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    setup = set_up_model(settings(deterministic=True))
    assert setup.describe("p").deterministic
    assert "deterministic: yes, in any batch\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "facts", "line"),
    [
        ({}, (0, 3), "off"),
        (
            {"speculative_tokens": 8, "speculative_ngram": 2},
            (8, 2),
            "up to 8 tokens a step, by n-grams of 2 and less",
        ),
    ],
)
def test_a_start_tells_whether_tokens_are_guessed(
    given: dict[str, int], facts: tuple[int, int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = set_up_model(settings(**given))
    described = setup.describe("p")
    assert (described.speculative_tokens, described.speculative_ngram) == facts
    limits = setup.options.limits
    assert (limits.speculative_tokens, limits.speculative_ngram) == facts
    assert f"speculation: {line}\n" in capsys.readouterr().err


@needs_kernels
@pytest.mark.parametrize("backend", ["cpu_torch", "reference"])
def test_other_attention_promises_nothing(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup = set_up_model(settings(attention_backend=backend))
    assert not setup.describe("p").deterministic
    reason = f"the sums of --attention-backend {backend} depend on how a prompt is cut"
    assert f"deterministic: no: {reason}\n" in capsys.readouterr().err
    with pytest.raises(StartupError, match=f"^--deterministic cannot be promised: {reason}.$"):
        set_up_model(settings(attention_backend=backend, deterministic=True))


@needs_kernels
@pytest.mark.parametrize(("given", "expected"), [("auto", "float32"), ("float32", "float32"), ("int8", "int8")])
def test_a_start_says_what_activations_are(given: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup = set_up_model(settings(activations_dtype=given))
    assert setup.describe("p").activations_dtype == expected
    assert f", weights float32, activations {expected}, K/V float32, " in capsys.readouterr().err


@needs_kernels
def test_activations_that_cannot_be_rounded_end_the_start() -> None:
    with pytest.raises(StartupError, match=r"^Activations of type int8 need weights in 8 or 4 bits, and here"):
        set_up_model(settings(weights_dtype="float32", activations_dtype="int8"))


def test_plain_torch_cannot_start_deterministic() -> None:
    sentence = (
        "^--deterministic cannot be promised: the model runs in plain torch on cpu, whose sums depend on the size"
    )
    with (
        mock.patch("model_runner.loading.library", return_value=None),
        pytest.raises(StartupError, match=sentence),
    ):
        set_up_model(settings(deterministic=True))


@needs_kernels
@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_a_backend_that_cannot_be_had_is_replaced_and_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    setup = set_up_model(settings(attention_backend=name))
    assert setup.describe("p").attention_backend == "cpu"
    assert (
        f"attention: cpu (not {name}: the device is cpu, and it needs CUDA; before cpu_torch, reference)\n"
        in capsys.readouterr().err
    )


def test_a_cache_of_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    setup = set_up_model(settings(kv_dtype="fp8_e4m3"))
    described = setup.describe("p")
    assert (described.kv_dtype, described.attention_backend) == ("float8_e4m3fn", "cpu_torch")
    assert described.kv_scales == "calibrated"
    # 2 (K, V) x 30 layers x 3 KV heads x 64 dimensions x 1 byte
    assert described.kv_bytes_per_token == 11_520
    log = capsys.readouterr().err
    assert re.search(
        r"^kv scales: calibrated on \d{3,4} tokens: K 0\.0625 to 0\.125, V 0\.003906 to 0\.125$", log, re.M
    )
    if INSTRUCTION_SETS:
        reason = "not cpu: the CPU kernels know no K/V in float8_e4m3fn"
        assert f"attention: cpu_torch ({reason}; before reference)\n" in log


def test_an_unknown_backend_is_one_sentence() -> None:
    with pytest.raises(StartupError, match=r"^--attention-backend: there is no attention backend 'flash'; .*\.$"):
        set_up_model(settings(attention_backend="flash"))


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(StartupError, match=r"^--cuda-graphs cannot be had: the device is cpu\.$"):
        set_up_model(settings(cuda_graphs=True))


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("auto", "octavo's own"),
        ("torch", "octavo's own"),
        ("flashinfer", "octavo's own (not flashinfer: the device is cpu, and it needs CUDA)"),
    ],
)
def test_a_start_says_what_draws(given: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert set_up_model(settings(sampling_backend=given)).sampler is None
    assert f"sampling: {line}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "tried"),
        ({"sampling_backend": "flashinfer"}, "tried"),
        ({"sampling_backend": "torch"}, "octavo's own"),
        ({"async_steps": "off"}, "octavo's own (not flashinfer: steps are not planned ahead)"),
        ({"speculative_tokens": 3}, "octavo's own (not flashinfer: steps are not planned ahead)"),
    ],
)
def test_what_draws_on_a_gpu(given: dict[str, Any], line: str) -> None:
    with mock.patch("services.model_setup.choose_sampler", return_value=SamplerChoice(None, "tried")):
        assert _choose_sampler(settings(**given), torch.device("cuda"), 50).line == line


def test_a_start_says_whether_there_are_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_model(settings())
    assert "cuda graphs: off: the device is cpu\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "guesses", "line"),
    [
        ("auto", 0, "off"),
        ("on", 0, "on"),
        ("off", 0, "off"),
        ("auto", 4, "off"),
        ("on", 4, "off: guesses need the tokens before them"),
    ],
)
def test_a_start_says_whether_steps_are_planned_ahead(
    given: str, guesses: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU; on a GPU auto is on."""
    setup = set_up_model(settings(async_steps=given, speculative_tokens=guesses))
    assert setup.options.async_steps is (line == "on")
    assert isinstance(setup.steps(), WorkerSteps if line == "on" else InlineSteps)
    assert f"async steps: {line}\n" in capsys.readouterr().err
