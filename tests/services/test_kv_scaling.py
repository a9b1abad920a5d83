"""Where the scales of K and V come from, who is told, and that K/V of other scales are never taken for one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model_runner.kv_scales import KvScales
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.model_setup import Setup, set_up_model
from tests.e2e.tiny_chat_model import write_tiny_chat_model

Start = Callable[..., Setup]
FP8: dict[str, Any] = {"kv_dtype": "fp8_e4m3"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_chat_model(tmp_path / "tiny")


@pytest.fixture
def start(model: Path) -> Start:
    def start(**given: Any) -> Setup:
        return set_up_model(
            ModelRunnerSettings(log_format="console", num_blocks=4, device="cpu", model=str(model), **given)
        )

    return start


def bring_scales(model: Path, *scales: tuple[float, float]) -> None:
    """Puts scales of K and V, of each layer, to the checkpoint."""
    tensors = load_file(model / "model.safetensors")
    for layer, (key, value) in enumerate(scales):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor([key])
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor([value])
    save_file(tensors, model / "model.safetensors")


def test_scales_of_a_checkpoint(start: Start, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring_scales(model, (0.5, 0.25), (0.125, 2.0))
    setup = start(**FP8)
    assert setup.backend.shape.scales == KvScales((0.5, 0.125), (0.25, 2.0))
    assert setup.describe("p").kv_scales == "checkpoint"
    assert "kv scales: checkpoint: K 0.125 to 0.5, V 0.25 to 2\n" in capsys.readouterr().err


def test_measured_ones_come_in_their_place(start: Start, model: Path) -> None:
    measured = start(**FP8)
    assert measured.describe("p").kv_scales == "calibrated"
    bring_scales(model, (0.5, 0.25), (0.125, 2.0))
    again = start(**FP8, kv_scales="calibrate")
    assert again.backend.shape.scales == measured.backend.shape.scales
    assert again.backend.shape.scales is not None
    assert again.describe("p").kv_scales == "calibrated"


def test_none(start: Start, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bring_scales(model, (0.5, 0.25), (0.125, 2.0))
    setup = start(**FP8, kv_scales="none")
    assert setup.backend.shape.scales is None
    assert setup.describe("p").kv_scales == "none"
    assert "kv scales: none\n" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_more_than_8_bits_have_none(start: Start, model: Path, dtype: str) -> None:
    """Whatever the checkpoint brings, and be it wrong."""
    bring_scales(model, (0.5, -1.0))
    setup = start(kv_dtype=dtype)
    assert setup.backend.shape.scales is None
    assert setup.describe("p").kv_scales == "none"


def test_k_and_v_of_other_scales_have_another_fingerprint(start: Start, model: Path) -> None:
    def fingerprint(**given: Any) -> str:
        return start(**given).options.facts.model_fingerprint

    plain, none, measured = fingerprint(), fingerprint(**FP8, kv_scales="none"), fingerprint(**FP8)
    assert measured == fingerprint(**FP8)
    assert measured.rpartition(":")[0] == none
    bring_scales(model, (0.5, 0.25), (0.125, 2.0))
    brought = fingerprint(**FP8)
    bring_scales(model, (0.5, 0.25), (0.125, 4.0))
    assert len({plain, none, measured, brought, fingerprint(**FP8)}) == 5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"kv_scales": "calibrate"},
            r"^--kv-scales calibrate is for --kv-dtype fp8_e4m3, not auto\.$",
        ),
        (
            {"kv_scales": "checkpoint", "kv_dtype": "bfloat16"},
            r"^--kv-scales checkpoint is for --kv-dtype fp8_e4m3, not bfloat16\.$",
        ),
        (
            {**FP8, "kv_scales": "checkpoint"},
            r"^tiny brings no scales of K/V; --kv-scales calibrate measures them\.$",
        ),
    ],
)
def test_what_ends_the_start(start: Start, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        start(**given)


def test_wrong_scales_end_the_start(start: Start, model: Path) -> None:
    bring_scales(model, (0.5, 0.25), (0.125, 0.0))
    with pytest.raises(
        StartupError, match=r"model\.safetensors: the scale of the values of layer 1 is 0\.0, not a number"
    ):
        start(**FP8)


def test_a_model_that_computes_no_numbers_ends_the_start(start: Start, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"].fill_(float("nan"))
    save_file(tensors, model / "model.safetensors")
    sentence = r"^The scales of K/V of tiny cannot be measured: the scale of the values of layer 1 is nan, not a number"
    with pytest.raises(StartupError, match=sentence):
        start(**FP8)
