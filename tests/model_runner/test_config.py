"""Configs as each family writes them, and the models that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model_runner.config import ModelConfig, RopeScaling
from model_runner.config_hf import config_from_hf
from model_runner.errors import ModelLoadError

# What the public config.json of Llama-3.1-8B-Instruct says, in the spelling of its time.
LLAMA_31 = {
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
MISTRAL_01 = {
    **{key: value for key, value in LLAMA_31.items() if key not in ("rope_scaling", "rope_theta")},
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "eos_token_id": 2,
    "vocab_size": 32000,
}
QWEN2_05 = {
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return config_from_hf(folder)


def test_llama_31(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA_31) == ModelConfig(
        architecture="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        sliding_window=None,
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
    )


def test_newer_spelling_of_rope(tmp_path: Path) -> None:
    rope = {**LLAMA_31["rope_scaling"], "rope_theta": 500000.0}
    newer = {key: value for key, value in LLAMA_31.items() if key not in ("rope_scaling", "rope_theta")}
    assert read(tmp_path, {**newer, "rope_parameters": rope}) == read(tmp_path, LLAMA_31)


def test_oldest_spelling_of_linear_scaling(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA_31, "rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", 4.0)


def test_llama_1_says_little(tmp_path: Path) -> None:
    silent = ("num_key_value_heads", "rope_scaling", "rope_theta", "tie_word_embeddings", "attention_bias")
    config = read(tmp_path, {key: value for key, value in LLAMA_31.items() if key not in silent})
    assert (config.num_kv_heads, config.rope_theta, config.rope_scaling) == (32, 10000.0, None)
    assert config.tie_word_embeddings is False


def test_stop_tokens_of_the_generation_config_come_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    assert read(tmp_path, QWEN2_05).eos_token_ids == (151645, 151643)


@pytest.mark.parametrize("generation", [None, "{}", '{"eos_token_id": null}'])
def test_stop_tokens_of_the_config_otherwise(tmp_path: Path, generation: str | None) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(generation)
    assert read(tmp_path, QWEN2_05).eos_token_ids == (151645,)


def test_families_differ_by_bias_and_norm(tmp_path: Path) -> None:
    qwen2, qwen3 = read(tmp_path, QWEN2_05), read(tmp_path, {**QWEN2_05, "model_type": "qwen3"})
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, 64)
    # Qwen3 that does not say how wide its heads are means 128, whatever its hidden size.
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)


@pytest.mark.parametrize(
    ("base", "changes", "window"),
    [
        (MISTRAL_01, {}, 4096),
        (MISTRAL_01, {"sliding_window": None}, None),
        (MISTRAL_01, {"sliding_window": 32768}, None),
        (QWEN2_05, {"sliding_window": 1024}, None),
        (QWEN2_05, {"sliding_window": 1024, "use_sliding_window": True}, None),
        (QWEN2_05, {"sliding_window": 1024, "use_sliding_window": True, "max_window_layers": 0}, 1024),
        (
            QWEN2_05,
            {"sliding_window": 1024, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 24},
            1024,
        ),
        (LLAMA_31, {"sliding_window": 1024}, None),
    ],
)
def test_sliding_window_only_when_in_use(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], window: int | None
) -> None:
    assert read(tmp_path, {**base, **changes}).sliding_window == window


def test_mistral_without_a_word_on_its_window_is_the_first(tmp_path: Path) -> None:
    config = {key: value for key, value in MISTRAL_01.items() if key != "sliding_window"}
    assert read(tmp_path, config).sliding_window == 4096


@pytest.mark.parametrize(
    ("base", "changes", "sentence"),
    [
        (LLAMA_31, {"model_type": "gemma3"}, "'gemma3' is not supported"),
        (LLAMA_31, {"model_type": None}, "model_type is missing"),
        (LLAMA_31, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_31, {"vocab_size": "many"}, "vocab_size is 'many'"),
        (LLAMA_31, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA_31, {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA_31, {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        (LLAMA_31, {"num_key_value_heads": 5}, "32 attention heads cannot be divided among 5"),
        (LLAMA_31, {"num_attention_heads": 33, "num_key_value_heads": 33}, "4096 cannot be divided among 33"),
        (LLAMA_31, {"head_dim": 127}, "127 dimensions"),
        (LLAMA_31, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        (LLAMA_31, {"rope_scaling": {"type": "longrope"}}, "'longrope' is not supported"),
        (LLAMA_31, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        (LLAMA_31, {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (LLAMA_31, {"rope_scaling": 4}, "rope_scaling is 4"),
        (LLAMA_31, {"rope_scaling": {**LLAMA_31["rope_scaling"], "low_freq_factor": 4.0}}, "not below"),
        (LLAMA_31, {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        (LLAMA_31, {"hidden_act": "gelu"}, "'gelu' is not supported"),
        (LLAMA_31, {"attention_bias": True}, "attention_bias is not supported"),
        (LLAMA_31, {"quantization_config": {"quant_method": "awq"}}, "quantised safetensors"),
        (QWEN2_05, {"use_sliding_window": True, "max_window_layers": 12}, "with and without a sliding window"),
        (QWEN2_05, {"use_sliding_window": True, "layer_types": ["chunked"]}, "layer_types"),
    ],
)
def test_refused(tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        read(tmp_path, {**base, **changes})
    assert sentence in str(refusal.value)
    assert str(tmp_path / "config.json") in str(refusal.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"llama"', b"\xff\xfe", b"[" * 100_000])
def test_damaged_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        config_from_hf(tmp_path)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        config_from_hf(tmp_path)
