"""The rotated model computes what the original does, from other numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.rotated import RotatedWeights, rotated_config
from model_runner.config_hf import config_from_hf
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights
from tests.model_runner.test_families import CPU, backend_for, last_logits

TINY = Path(__file__).parent.parent / "data" / "tiny"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_logits_are_those_of_transformers(family: str) -> None:
    config, weights = config_from_hf(TINY / family), SafetensorsWeights(TINY / family)
    rotated = RotatedWeights(weights, config)
    model = Decoder(rotated_config(config), rotated, torch.float32, CPU)
    for item in json.loads((TINY / family / "golden.json").read_text()):
        logits = last_logits(model, backend_for("reference", config), item["token_ids"], 40)
        torch.testing.assert_close(logits, torch.tensor(item["logits"]), atol=1e-4, rtol=0)
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.allclose(rotated.load(name), weights.load(name).float(), atol=1e-3)
