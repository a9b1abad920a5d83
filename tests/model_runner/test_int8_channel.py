"""One scale for each output, activations in 8 bits: how far off a model is then, and how often it says the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.batch import BatchEntry, pack_batch
from model_runner.loading import LoadedModel
from model_runner.models.native import NativeDecoder
from tests.model_runner.native_support import INSTRUCTION_SETS
from tests.model_runner.test_families import CPU
from tests.model_runner.test_native_model import SIZE, cache_for, error_of_logits

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")


def test_int8_channel_rounds_what_the_file_has_in_any_form(
    smollm2: LoadedModel, smollm2_channel: LoadedModel, golden_smollm2: list[dict[str, Any]], record_property: Any
) -> None:
    """Of the tokens that float32 draws greedily, most are still the likeliest where they were drawn."""
    assert set(smollm2_channel.model.forms()) == {"int8_channel"}
    assert smollm2_channel.weights_form == "int8_channel"
    error = error_of_logits(smollm2_channel.model, smollm2.model, golden_smollm2)
    agreeing = share_of_likeliest(smollm2_channel.model, golden_smollm2)
    record_property("logit error of int8_channel, int8 activations", error)
    print(f"logit error of int8_channel, int8 activations: {error:.4f}; the same tokens: {agreeing:.3f}")
    assert 0 < error < 0.2
    assert agreeing > 0.93
    assert share_of_likeliest(smollm2.model, golden_smollm2) > 0.999


def share_of_likeliest(model: NativeDecoder, golden: list[dict[str, Any]]) -> float:
    """Of the golden outputs' tokens, those that are the likeliest after what is before them."""
    same: list[Tensor] = []
    for item in golden:
        prompt, output = item["prompt_token_ids"], torch.tensor(item["output_ids"])
        tokens = prompt + item["output_ids"][:-1]
        backend = cache_for(model.config, -(-len(tokens) // SIZE) + 1)
        entry = BatchEntry(tokens, 0, range(1, -(-len(tokens) // SIZE) + 1), num_logits=len(output))
        same.append(model.forward(pack_batch([entry], SIZE, CPU), backend).argmax(dim=1) == output)
    return torch.cat(same).float().mean().item()
