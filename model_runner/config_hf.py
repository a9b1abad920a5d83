"""The config of a model in a Hugging Face directory: config.json, and generation_config.json for where it stops.

A key that is absent means what transformers takes it for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from model_runner.config import (
    Architecture,
    ModelConfig,
    RopeScaling,
    checked,
    head_dim_of,
    known_architecture,
    window_in_use,
)
from model_runner.errors import ModelLoadError
from model_runner.fields import Fields
from model_runner.json_file import read_object
from model_runner.quantization_hf import refuse_quantised

_QWEN3_HEAD_DIM = 128
_MISTRAL_WINDOW = 4096
_QWEN_FULL_LAYERS = 28


def config_from_hf(path: Path) -> ModelConfig:
    """Reads the config of the model in the directory `path`. Raises ModelLoadError."""
    file = path / "config.json"
    fields = Fields(file, read_object(file))
    architecture = known_architecture(file, fields.text("model_type"))
    _refuse_unsupported(fields, architecture)
    hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    rope = fields.object("rope_parameters") or fields.object("rope_scaling") or Fields(file, {})
    max_positions = fields.count("max_position_embeddings")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", default=num_heads),
        head_dim=_head_dim(fields, architecture, hidden_size, num_heads),
        rms_norm_eps=fields.positive("rms_norm_eps", default=1e-6),
        rope_theta=rope.positive("rope_theta", default=fields.positive("rope_theta", default=10000.0)),
        rope_scaling=_rope_scaling(rope),
        max_position_embeddings=max_positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=window_in_use(_sliding_window(fields, architecture), max_positions),
        eos_token_ids=_eos_token_ids(path, fields),
        bos_token_id=fields.token_id("bos_token_id"),
    )
    return checked(file, config)


def _refuse_unsupported(fields: Fields, architecture: Architecture) -> None:
    """Refuses variants that would load, and compute something else."""
    if fields.get("hidden_act") not in (None, "silu"):
        raise ModelLoadError(f"{fields.path}: hidden_act {fields.get('hidden_act')!r} is not supported; 'silu' is.")
    for key in ("attention_bias", "mlp_bias"):
        # Qwen2 has its bias on q, k and v always, and this key does not speak of it.
        if fields.flag(key, default=False) and architecture != "qwen2":
            raise ModelLoadError(f"{fields.path}: {key} is not supported for {architecture}.")
    refuse_quantised(fields)
    if fields.positive("partial_rotary_factor", default=1.0) != 1.0:
        raise ModelLoadError(f"{fields.path}: a partial_rotary_factor other than 1 is not supported.")


def _head_dim(fields: Fields, architecture: Architecture, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is not None:
        return fields.count("head_dim")
    if architecture == "qwen3":
        return _QWEN3_HEAD_DIM
    return head_dim_of(fields.path, hidden_size, num_heads)


def _rope_scaling(rope: Fields) -> RopeScaling | None:
    """From rope_scaling, or from rope_parameters as newer files call it; `type` is the older spelling of rope_type."""
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", rope.positive("factor"))
    if kind == "llama3":
        return _llama3_scaling(rope)
    raise ModelLoadError(f"{rope.path}: the rope scaling {kind!r} is not supported; 'linear' and 'llama3' are.")


def _llama3_scaling(rope: Fields) -> RopeScaling:
    low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
    if low >= high:
        raise ModelLoadError(f"{rope.path}: low_freq_factor {low} is not below high_freq_factor {high}.")
    return RopeScaling("llama3", rope.positive("factor"), low, high, rope.count("original_max_position_embeddings"))


def _sliding_window(fields: Fields, architecture: Architecture) -> int | None:
    if architecture == "llama":
        return None
    if architecture == "mistral":
        return _mistral_window(fields)
    if not fields.flag("use_sliding_window", default=False) or fields.get("sliding_window") is None:
        return None
    window = fields.count("sliding_window")
    return window if _layers_slide(fields) else None


def _mistral_window(fields: Fields) -> int | None:
    # For Mistral, null says that there is no window, and silence that it is the first model's.
    if fields.has("sliding_window") and fields.get("sliding_window") is None:
        return None
    return fields.count("sliding_window", default=_MISTRAL_WINDOW)


def _layers_slide(fields: Fields) -> bool:
    """Whether all layers of a Qwen have the window, or none. Raises ModelLoadError for a model that mixes them."""
    num_layers = fields.count("num_hidden_layers")
    kinds = set(_layer_kinds(fields, num_layers))
    if len(kinds) > 1:
        raise ModelLoadError(f"{fields.path}: layers with and without a sliding window in one model are not supported.")
    return kinds == {"sliding_attention"}


def _layer_kinds(fields: Fields, num_layers: int) -> list[Literal["full_attention", "sliding_attention"]]:
    listed = fields.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list) or not {*map(str, listed)} <= {"full_attention", "sliding_attention"}:
            raise fields.wrong("layer_types", "a list of 'full_attention' and 'sliding_attention'")
        return listed
    full = fields.get("max_window_layers")
    first_sliding = _QWEN_FULL_LAYERS if full is None else 0 if full == 0 else fields.count("max_window_layers")
    return ["full_attention" if index < first_sliding else "sliding_attention" for index in range(num_layers)]


def _eos_token_ids(path: Path, fields: Fields) -> tuple[int, ...]:
    """generation_config.json knows more: chat models stop at the end of a turn too."""
    file = path / "generation_config.json"
    if file.exists():
        generation = Fields(file, read_object(file))
        if generation.get("eos_token_id") is not None:
            return generation.token_ids("eos_token_id")
    return fields.token_ids("eos_token_id")
