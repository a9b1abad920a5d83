"""The decoder against transformers: random models of each family, whose logits make_tiny_models.py wrote down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.config import ModelConfig
from model_runner.config_hf import config_from_hf
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights

FAMILIES = ["llama", "llama_linear", "mistral", "qwen2", "qwen2_window", "qwen3", "sharded"]
CPU = torch.device("cpu")
BLOCK_SIZE = 8
# The longest prompt has 40 tokens; block 0 is the null block.
BLOCKS = [3, 1, 6, 2, 5]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_models: Path) -> Path:
    return tiny_models / request.param


def backend_for(name: str, config: ModelConfig) -> AttentionBackend:
    return create_backend(
        name,
        AttentionShape(
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=BLOCK_SIZE,
            num_blocks=max(BLOCKS) + 1,
            kv_dtype=torch.float32,
            device=CPU,
            sliding_window=config.sliding_window,
        ),
    )


def last_logits(model: Decoder, backend: AttentionBackend, token_ids: list[int], chunk: int) -> torch.Tensor:
    """The logits after the prompt, which is computed `chunk` tokens at a time."""
    logits = torch.empty(0)
    for first in range(0, len(token_ids), chunk):
        entry = BatchEntry(token_ids[first : first + chunk], first, BLOCKS, num_logits=1)
        with torch.inference_mode():
            logits = model.forward(pack_batch([entry], BLOCK_SIZE, CPU), backend)
    return logits[0]


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("attention", ["reference", "cpu", "cpu_torch"])
def test_logits_are_those_of_transformers(folder: Path, attention: str, chunk: int) -> None:
    config = config_from_hf(folder)
    model = Decoder(config, SafetensorsWeights(folder), torch.float32, CPU)
    for item in json.loads((folder / "golden.json").read_text()):
        logits = last_logits(model, backend_for(attention, config), item["token_ids"], chunk)
        torch.testing.assert_close(logits, torch.tensor(item["logits"]), atol=1e-4, rtol=0)


def test_each_family_is_what_it_stands_for(tiny_models: Path) -> None:
    """Without this, a model made without its feature would pass for one that has it."""
    configs = {name: config_from_hf(tiny_models / name) for name in FAMILIES}
    assert {name: config.sliding_window for name, config in configs.items() if config.sliding_window} == {
        "mistral": 8,
        "qwen2_window": 8,
    }
    scalings = {name: config.rope_scaling.kind for name, config in configs.items() if config.rope_scaling}
    assert scalings == {"llama": "llama3", "llama_linear": "linear"}
    assert {name for name, config in configs.items() if config.qkv_bias} == {"qwen2", "qwen2_window"}
    assert {name for name, config in configs.items() if config.qk_norm} == {"qwen3"}
    assert {name for name, config in configs.items() if config.tie_word_embeddings} == {"llama_linear", "qwen2"}
    assert configs["qwen3"].head_dim != configs["qwen3"].hidden_size // configs["qwen3"].num_heads
