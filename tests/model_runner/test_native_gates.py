"""Gates and ups lie by turns in blocks of 96: the same products for any number of them, with every instruction set."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.gpu.random_model import RandomWeights
from model_runner.config_hf import config_from_hf
from model_runner.models.decoder import Decoder
from model_runner.models.native import NativeDecoder
from tests.model_runner.native_support import INTEGER_SETS, using
from tests.model_runner.test_families import CPU, backend_for, last_logits

pytestmark = pytest.mark.skipif(not INTEGER_SETS, reason="the CPU kernels are not built")

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79]


class LargeWeights(RandomWeights):
    """Matrices large enough for all of them to matter, the same ones in any order of loading."""

    @cache  # noqa: B019
    def load(self, name: str) -> Tensor:
        self._draw.manual_seed(sum(name.encode()))
        return super().load(name) * 10 if len(self.shape_of(name)) > 1 else super().load(name)


@pytest.mark.parametrize("inner", [32, 96, 128, 192, 224, 320])
@pytest.mark.parametrize("instruction_set", INTEGER_SETS)
def test_models_of_any_inner_size(tiny_models: Path, instruction_set: str, inner: int) -> None:
    """A part of a block, whole ones, and some with a part at the end."""
    config = replace(config_from_hf(tiny_models / "llama"), hidden_size=64, head_dim=16, intermediate_size=inner)
    weights = LargeWeights(config, torch.float32, CPU)
    expected = last_logits(Decoder(config, weights, torch.float32, CPU), backend_for("reference", config), TOKENS, 20)
    for form, activations, most in (("float32", "float32", 1e-5), ("int8", "int8", 0.1), ("int8_channel", "int8", 0.1)):
        with using(instruction_set):
            model = NativeDecoder(config, weights, form, activations=activations)
        for chunk in (1, 20):
            logits = last_logits(model, backend_for("cpu", config), TOKENS, chunk)
            error = (logits - expected).pow(2).mean().sqrt() / expected.std()
            assert error < most, f"{form}, chunks of {chunk}: {error:.2e}"
