"""Weights and a config that do not belong together: refused in one sentence that names the file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from model_runner.config_hf import config_from_hf
from model_runner.errors import ModelLoadError
from model_runner.loading import load_model
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights
from tests.model_runner.gguf_maker import tiny_metadata, tiny_tensors, write_gguf

CPU = torch.device("cpu")


def changed(source: Path, target: Path, **changes: Any) -> Path:
    """A copy of the model in `source` whose config says otherwise."""
    shutil.copytree(source, target)
    config = target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return target


def decoder(folder: Path) -> Decoder:
    return Decoder(config_from_hf(folder), SafetensorsWeights(folder), torch.float32, CPU)


@pytest.mark.parametrize(("model", "file"), [("llama", "model.safetensors"), ("sharded", "model-0000")])
def test_a_wrong_shape_names_the_file_the_tensor_and_both_shapes(
    tiny_models: Path, tmp_path: Path, model: str, file: str
) -> None:
    folder = changed(tiny_models / model, tmp_path / "changed", intermediate_size=50)
    with pytest.raises(ModelLoadError, match=r"mlp\.gate_proj\.weight has shape \[48, 32\].*\[50, 32\]\.$") as caught:
        decoder(folder)
    assert str(caught.value).startswith(str(folder / file))


def test_a_config_with_fewer_layers_than_the_weights(tiny_models: Path, tmp_path: Path) -> None:
    """It would load, and be another model."""
    folder = changed(tiny_models / "llama", tmp_path / "changed", num_hidden_layers=1)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors has model\.layers\.1\..* says 1 layers\.$"):
        decoder(folder)


def test_a_gguf_header_with_fewer_layers_than_its_tensors(tiny_models: Path, tmp_path: Path) -> None:
    metadata = tiny_metadata() | {"llama.block_count": 1}
    file = write_gguf(tmp_path / "short.gguf", metadata, tiny_tensors(tiny_models / "llama"))
    with pytest.raises(ModelLoadError, match=r"short\.gguf: llama\.block_count is 1, .* layer 1\.$"):
        load_model(file)


@pytest.mark.parametrize("eps", [10**400, float("inf"), float("nan"), 0, -1e-6, True])
def test_a_number_that_is_no_positive_float(tiny_models: Path, tmp_path: Path, eps: float) -> None:
    """JSON can hold integers that no float can."""
    folder = changed(tiny_models / "llama", tmp_path / "changed", rms_norm_eps=eps)
    with pytest.raises(ModelLoadError, match=r"config\.json: rms_norm_eps is .* should be a number above 0\.$"):
        decoder(folder)
