"""Scales of K and V: what they may be, and the names and forms in which checkpoints bring them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runner.checkpoint_scales import checkpoint_scales
from model_runner.config_hf import config_from_hf
from model_runner.errors import ModelLoadError
from model_runner.kv_scales import KvScales
from model_runner.weights import SafetensorsWeights

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
OF_K_PROJ = {"targets": ["re:.*k_proj"], "weights": None, "input_activations": None, "output_activations": FP8}

Write = Callable[[dict[str, Any]], Path]


@pytest.fixture
def write(tiny_models: Path, tmp_path: Path) -> Write:
    """Writes the tiny llama, of two layers, with further tensors, numbers or lists, in its attention."""

    def write(further: dict[str, Any]) -> Path:
        path = Path(shutil.copytree(tiny_models / "llama", tmp_path / "model"))
        tensors: dict[str, Tensor] = load_file(path / "model.safetensors")
        for name, value in further.items():
            layer, _, rest = name.partition(".")
            tensors[f"model.layers.{layer}.self_attn.{rest}"] = torch.tensor(value)
        save_file(tensors, path / "model.safetensors")
        return path

    return write


def read(path: Path) -> KvScales | None:
    return checkpoint_scales(SafetensorsWeights(path), 2)


class TestScales:
    def test_a_name_is_of_all_numbers_in_their_order(self) -> None:
        made = [
            KvScales((0.5, 1.0), (2.0, 4.0)),
            KvScales((1.0, 0.5), (2.0, 4.0)),
            KvScales((2.0, 4.0), (0.5, 1.0)),
            KvScales((0.5, 1.0), (2.0, math.nextafter(4.0, 5.0))),
        ]
        assert len({each.name for each in made}) == 4
        assert KvScales((0.5, 1.0), (2.0, 4.0)).name == made[0].name

    @pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
    def test_what_no_scale_is(self, wrong: float) -> None:
        with pytest.raises(ValueError, match=rf"^the scale of the values of layer 1 is {wrong}, not a number above 0$"):
            KvScales((1.0, 1.0), (1.0, wrong))

    def test_keys_and_values_are_of_the_same_layers(self) -> None:
        with pytest.raises(ValueError, match=r"^2 layers have scales of keys, and 1 of values$"):
            KvScales((1.0, 1.0), (1.0,))

    def test_words(self) -> None:
        assert KvScales((0.5, 0.0625), (2.0, 2.0)).describe() == "K 0.0625 to 0.5, V 2"


class TestCheckpoints:
    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("k_scale", "v_scale"),
            ("attn.k_scale", "attn.v_scale"),
            ("k_proj.k_scale", "v_proj.v_scale"),
            ("qkv_proj.k_scale", "qkv_proj.v_scale"),
            ("k_proj.output_scale", "v_proj.output_scale"),
        ],
    )
    def test_names_that_quantisers_give(self, write: Write, key: str, value: str) -> None:
        path = write({f"0.{key}": [0.5], f"0.{value}": 0.25, f"1.{key}": 0.125, f"1.{value}": [3.0]})
        assert read(path) == KvScales((0.5, 0.125), (0.25, 3.0))

    @pytest.mark.parametrize("name", ["kv_scale", "attn.kv_scale"])
    def test_one_for_both(self, write: Write, name: str) -> None:
        assert read(write({f"0.{name}": 0.5, f"1.{name}": 0.25})) == KvScales((0.5, 0.25), (0.5, 0.25))

    def test_none(self, write: Write) -> None:
        """What is no scale of K or V is not taken for one."""
        assert read(write({"0.k_proj.weight_scale": 0.5, "0.q_scale": 0.5, "0.q_proj.output_scale": 0.5})) is None

    @pytest.mark.parametrize(
        ("further", "sentence"),
        [
            (
                {"0.k_scale": 0.5, "0.v_scale": 0.5},
                r"/model.safetensors has model\.layers\.0\.self_attn\.k_scale, and layer 1 has no k_scale\.$",
            ),
            (
                {"0.k_scale": 0.5, "1.k_scale": 0.5},
                r"/model.safetensors has model\.layers\.0\.self_attn\.k_scale, and layer 0 has no v_scale\.$",
            ),
            (
                {"0.kv_scale": 0.5, "1.kv_scale": [0.5, 0.25]},
                r"\.1\.self_attn\.kv_scale has 2 scales, and one for all heads of a layer is supported\.$",
            ),
            (
                {"0.kv_scale": 0.5, "1.kv_scale": -1.0},
                r": the scale of the keys of layer 1 is -1\.0, not a number above",
            ),
        ],
    )
    def test_what_is_refused(self, write: Write, further: dict[str, Any], sentence: str) -> None:
        path = write(further)
        with pytest.raises(ModelLoadError, match=sentence):
            read(path)


class TestQuantizationConfig:
    @pytest.fixture
    def config(self, tiny_models: Path, tmp_path: Path) -> Callable[[dict[str, Any]], Any]:
        def load(quantization: dict[str, Any]) -> Any:
            settings = json.loads((tiny_models / "llama" / "config.json").read_text())
            (tmp_path / "config.json").write_text(json.dumps({**settings, "quantization_config": quantization}))
            return config_from_hf(tmp_path)

        return load

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": FP8},
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": OF_K_PROJ}, "kv_cache_scheme": FP8},
            {"quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
            {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": None},
        ],
    )
    def test_quantised_k_and_v_alone(self, config: Callable[..., Any], quantization: dict[str, Any]) -> None:
        assert config(quantization).num_layers == 2

    @pytest.mark.parametrize(
        "quantization",
        [
            {"quant_method": "awq"},
            {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"input_activations": {"num_bits": 8}}},
            },
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FP8},
            {"kv_cache_scheme": FP8},
        ],
    )
    def test_quantised_weights(self, config: Callable[..., Any], quantization: dict[str, Any]) -> None:
        with pytest.raises(ModelLoadError, match="quantised safetensors are not supported"):
            config(quantization)

    @pytest.mark.parametrize("change", [{"num_bits": 4}, {"type": "int"}, {"dynamic": True}, {"symmetric": False}])
    def test_k_and_v_of_another_kind(self, config: Callable[..., Any], change: dict[str, Any]) -> None:
        scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**FP8, **change}}
        with pytest.raises(
            ModelLoadError, match=r"kv_cache_scheme is .*, and of its kinds static, symmetric floats of 8"
        ):
            config(scheme)

    def test_groups_that_are_none(self, config: Callable[..., Any]) -> None:
        with pytest.raises(ModelLoadError, match=r"config_groups is .*, and should be an object of objects"):
            config({"quant_method": "compressed-tensors", "config_groups": ["group_0"]})
