"""Scales that are measured: by hand on a model that says what its K and V are, and on models that compute."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench.rescaled import FAR_OUT, RescaledWeights
from model_runner.attention import AttentionShape, create_backend
from model_runner.attention.backend import AttentionBackend
from model_runner.batch import BatchEntry, StepBatch, pack_batch
from model_runner.calibration import MOST_TOKENS, calibrate, calibration_prompts, scale_for
from model_runner.config_hf import config_from_hf
from model_runner.kv_scales import KvScales
from model_runner.loading import LoadedModel
from model_runner.models.decoder import Decoder
from model_runner.models.native import NativeDecoder
from model_runner.weights import SafetensorsWeights
from tests.model_runner.attention_world import CPU

SHAPE = AttentionShape(2, 2, 1, 8, 16, 2, torch.float8_e4m3fn, CPU)
LARGEST = 224.0
"""Half of what fp8_e4m3 has."""


class Says:
    """A model whose keys and values are multiples of its tokens, in layer 1 negative; each row has one of them."""

    def __init__(self, keys: tuple[float, float], values: tuple[float, float]) -> None:
        self._keys, self._values = keys, values

    def forward(self, batch: StepBatch, backend: AttentionBackend) -> Tensor:
        backend.plan(batch)
        size = (len(batch.token_ids), 1, 8)
        for layer, sign in enumerate((1, -1)):
            rows = torch.zeros(size)
            rows[:, 0, 3] = sign * batch.token_ids.float()
            backend.run(layer, torch.zeros(size).repeat(1, 2, 1), rows * self._keys[layer], rows * self._values[layer])
        return torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("measured", "scale"),
    [
        (224.0, 1.0),
        (math.nextafter(224.0, 225.0), 2.0),
        (112.0, 0.5),
        (113.0, 1.0),
        (14.0, 0.0625),
        (0.001, 2.0**-17),  # 0.001 x 2**17 is 131
        (3000.0, 16.0),
        (0.0, 1.0),
    ],
)
def test_a_scale_is_the_smallest_power_of_two(measured: float, scale: float) -> None:
    assert scale_for(measured, LARGEST) == scale


@pytest.mark.parametrize("measured", [1e-30, 0.7, 5.0, 1e6, 2.0**-20])
def test_what_is_measured_leaves_room_for_twice_as_much_and_less_than_four_times(measured: float) -> None:
    assert 112 < measured / scale_for(measured, LARGEST) <= 224


def test_by_hand() -> None:
    """The largest token is 70, in the last place of the second prompt, which is longer than a block.

    Layer 0: keys up to 70, values up to 140; layer 1: keys up to 7, values up to 7000, all of them negative.
    """
    model: Any = Says((1.0, 0.1), (2.0, 100.0))
    scales = calibrate(model, [[3, 60, 5], [1] * 20 + [70], [2]], SHAPE)
    assert scales == KvScales((0.5, 0.03125), (1.0, 32.0))


def test_what_is_no_number_is_told_with_its_layer() -> None:
    model: Any = Says((1.0, math.nan), (1.0, 1.0))
    with pytest.raises(ValueError, match=r"^the scale of the keys of layer 1 is nan, not a number above 0$"):
        calibrate(model, [[5]], SHAPE)


class TestPrompts:
    def test_of_a_model_with_a_template(self, smollm2: LoadedModel) -> None:
        prompts = calibration_prompts(smollm2.tokenizer, 8192)
        assert len(prompts) == 5
        assert smollm2.tokenizer.decode(prompts[0]).startswith("The ferry left at six")
        # The template says who speaks, and ends where the assistant begins.
        assert smollm2.tokenizer.decode(prompts[4]).endswith("<|im_start|>assistant\n")
        assert 500 < sum(map(len, prompts)) < 2000

    def test_of_a_model_without(self, smollm2: LoadedModel) -> None:
        with mock.patch.object(smollm2.tokenizer, "chat_template", None):
            assert len(calibration_prompts(smollm2.tokenizer, 8192)) == 4

    def test_of_a_model_for_few_tokens(self, smollm2: LoadedModel) -> None:
        assert [len(prompt) for prompt in calibration_prompts(smollm2.tokenizer, 40)] == [40] * 5
        assert MOST_TOKENS == 512


def logits(model: Decoder | NativeDecoder, shape: AttentionShape, prompt: list[int]) -> Tensor:
    """Of the tokens of a prompt in two steps, so that the second reads what the first has stored."""
    backend = create_backend("cpu_torch", replace(shape, num_blocks=4))
    rows = []
    for first, end in ((0, len(prompt) // 2), (len(prompt) // 2, len(prompt))):
        batch = pack_batch([BatchEntry(prompt[first:end], first, [1, 2, 3], end - first)], 16, CPU)
        rows.append(model.forward(batch, backend))
    return torch.cat(rows)


@torch.inference_mode()
def test_larger_keys_and_smaller_values_cost_nothing(tiny_models: Path) -> None:
    """The same function with keys 4,096 times as large and values a 4,096th: the same bits with measured scales.

    Without scales keys are cut off, and values round to 0. How far rounding alone takes random weights: 0.11 of the
    logits' length.
    """
    config, prompt = config_from_hf(tiny_models / "llama"), [1, *range(3, 42)]
    weights = SafetensorsWeights(tiny_models / "llama")
    small = AttentionShape(
        config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, 16, 2, torch.float8_e4m3fn, CPU
    )
    moved = {end: 2.0 ** (-12 if factor < 1 else 12) for end, factor in FAR_OUT.items()}
    found = []
    for factors in ({}, moved):
        model = Decoder(config, RescaledWeights(weights, factors), torch.float32, CPU)
        exact = logits(model, replace(small, kv_dtype=torch.float32), prompt)
        scaled = logits(model, replace(small, scales=calibrate(model, [prompt], small)), prompt)
        assert 0 < (scaled - exact).norm() / exact.norm() < 0.15
        found.append((exact, scaled))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert (logits(model, small, prompt) - exact).norm() / exact.norm() > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_measure_the_same(tiny_models: Path, dtype: torch.dtype) -> None:
    """As on a GPU; what is measured is rounded to 8 bits or more, and the scales are powers of two."""
    config, prompts = config_from_hf(tiny_models / "llama"), [[1, *range(3, 42)], [1, 70, 71]]
    shape = AttentionShape(
        config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, 16, 2, torch.float8_e4m3fn, CPU
    )
    weights, found = SafetensorsWeights(tiny_models / "llama"), []
    for each in (torch.float32, dtype):
        model = Decoder(config, weights, each, CPU)
        found.append(calibrate(model, prompts, replace(shape, query_dtype=each)))
    assert found[0] == found[1]


@torch.inference_mode()
def test_a_real_model_in_8_bits(smollm2: LoadedModel) -> None:
    """Its next token's distribution is off by 0.006 nats, as in bench.kv_scales.

    By a sixteenth of its scales keys and values are cut off, and by 2**14 times these most of them round to 0.
    """
    c, tokenizer = smollm2.config, smollm2.tokenizer
    exact = AttentionShape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 16, 2, torch.float32, CPU)
    small = replace(exact, kv_dtype=torch.float8_e4m3fn)
    scales = calibrate(smollm2.model, calibration_prompts(tokenizer, 40)[:2], small)
    prompt = tokenizer.encode(
        "The sea was calm, and the boats of the fishermen lay on the beach in the morning sun. " * 2
    )
    truth = logits(smollm2.model, exact, prompt[:32]).log_softmax(-1)

    def divergence(scales: KvScales) -> float:
        found = logits(smollm2.model, replace(small, scales=scales), prompt[:32]).log_softmax(-1)
        return (truth.exp() * (truth - found)).sum(-1).mean().item()

    def times(factor: float) -> KvScales:
        return KvScales(tuple(each * factor for each in scales.keys), tuple(each * factor for each in scales.values))

    near, cut, vanished = divergence(scales), divergence(times(2**-4)), divergence(times(2**14))
    assert near < 0.02
    assert min(cut, vanished) > 10 * near
