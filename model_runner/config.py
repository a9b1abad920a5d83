"""What a decoder must know of its model, and which models there are decoders for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from model_runner.errors import ModelLoadError

Architecture = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched: all by `factor`, or by Llama 3's rule. original_max_position: tokens."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's sizes and switches. sliding_window: tokens that a query sees, its own included; None for all."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def known_architecture(path: Path, name: str) -> Architecture:
    """`name`, if there is a decoder for it. Raises ModelLoadError."""
    for known in ARCHITECTURES:
        if name == known:
            return known
    raise ModelLoadError(f"{path}: the architecture {name!r} is not supported; {', '.join(ARCHITECTURES)} are.")


def checked(path: Path, config: ModelConfig) -> ModelConfig:
    """The config, if its sizes go together. Raises ModelLoadError with the numbers."""
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{path}: {config.num_heads} attention heads cannot be divided among {config.num_kv_heads} KV heads."
        )
    if config.head_dim % 2:
        raise ModelLoadError(f"{path}: heads of {config.head_dim} dimensions cannot be rotated in pairs.")
    return config


def head_dim_of(path: Path, hidden_size: int, num_heads: int) -> int:
    """What a model means that does not say how wide its heads are. Raises ModelLoadError."""
    if hidden_size % num_heads:
        raise ModelLoadError(f"{path}: the hidden size {hidden_size} cannot be divided among {num_heads} heads.")
    return hidden_size // num_heads


def window_in_use(window: int | None, max_position_embeddings: int) -> int | None:
    """The sliding window in tokens, or None where no sequence is long enough to leave it."""
    return window if window is not None and window < max_position_embeddings else None
