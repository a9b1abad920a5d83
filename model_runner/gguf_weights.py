"""The tensors of a GGUF file, dequantised, under the names and in the row order of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from model_runner.config import ModelConfig
from model_runner.errors import ModelLoadError
from model_runner.gguf_file import GgufFile
from model_runner.weights import Grouped

_WHOLE_MODEL = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufWeights:
    """A WeightSource of float32 tensors, of whatever encoding the file has them in."""

    def __init__(self, reader: GgufFile, config: ModelConfig) -> None:
        self._reader = reader
        self._config = config
        self._names = {theirs: ours for theirs, ours in _names(config.num_layers).items() if ours in reader.tensors}
        # Files of this architecture have q and k rows in the order that rotates neighbours as a pair.
        self._interleaved = reader.metadata.get("general.architecture") == "llama"

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self._names))

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._reader.tensors[self._names[name]].shape

    def bytes_of(self, name: str) -> int:
        return self._reader.tensors[self._names[name]].num_bytes

    def file_of(self, name: str) -> Path:
        return self._reader.path

    def load(self, name: str) -> Tensor:
        if name not in self._names:
            raise ModelLoadError(f"{self._reader.path} has no tensor for {name}.")
        return torch.from_numpy(self._in_our_order(name, self._dequantized(self._names[name])))

    def load_exact(self, name: str) -> Tensor | Grouped:
        if name not in self._names:
            return self.load(name)
        raw, kind = self._reader.raw(self._names[name]), self._reader.tensors[self._names[name]].kind
        if kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(self._in_our_order(name, raw.view(np.int16).copy())).view(torch.bfloat16)
        if kind not in _GROUPED or raw.ndim != 2:
            return self.load(name)
        return _GROUPED[kind](self._in_our_order(name, raw))

    def _in_our_order(self, name: str, array: NDArray) -> NDArray:
        """The file's rows in the order of Hugging Face checkpoints."""
        if self._interleaved and ".q_proj." in name:
            return self._in_halves(name, array, self._config.num_heads)
        if self._interleaved and ".k_proj." in name:
            return self._in_halves(name, array, self._config.num_kv_heads)
        return array

    def rope_freq_factors(self) -> Tensor | None:
        if _ROPE_FACTORS not in self._reader.tensors:
            return None
        factors = self._dequantized(_ROPE_FACTORS)
        if factors.shape != (self._config.head_dim // 2,) or not (factors > 0).all():
            raise ModelLoadError(
                f"{self._reader.path}: {_ROPE_FACTORS} should have {self._config.head_dim // 2} numbers above 0."
            )
        return torch.from_numpy(factors)

    def files(self) -> list[Path]:
        return [self._reader.path]

    def _dequantized(self, name: str) -> NDArray[np.float32]:
        """An array of its own: torch would warn of one that lies in the read-only file."""
        tensor = self._reader.tensors[name]
        try:
            array = dequantize(self._reader.raw(name), tensor.kind)
        except NotImplementedError:
            raise ModelLoadError(
                f"{self._reader.path}: the encoding {tensor.kind.name} of tensor {name} is not supported."
            ) from None
        return array if array.flags.writeable else array.copy()

    def _in_halves(self, name: str, array: NDArray, num_heads: int) -> NDArray:
        """Puts the first of each rotated pair in the first half of its head, the second in the second half."""
        if len(array) % (2 * num_heads):
            raise ModelLoadError(
                f"{self._reader.path}: the {len(array)} rows of {name} cannot be divided among {num_heads} heads."
            )
        pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _q8_0(raw: NDArray[np.uint8]) -> Grouped:
    """Blocks of a half-precision scale and 32 signed bytes."""
    blocks = raw.reshape(len(raw), -1, 34)
    numbers = blocks[..., 2:].reshape(len(raw), -1).view(np.int8)
    return Grouped("int8", torch.from_numpy(numbers.copy()), _halves(blocks, 0), None)


def _q4_0(raw: NDArray[np.uint8]) -> Grouped:
    """Blocks of a half-precision scale and 32 half bytes that count from -8 on."""
    blocks = raw.reshape(len(raw), -1, 18)
    scales = _halves(blocks, 0)
    return Grouped("int4", _half_bytes(blocks[..., 2:]), scales, -8 * scales)


def _q4_1(raw: NDArray[np.uint8]) -> Grouped:
    """Blocks of a scale and an offset in half precision, and 32 half bytes."""
    blocks = raw.reshape(len(raw), -1, 20)
    return Grouped("int4", _half_bytes(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _halves(blocks: NDArray[np.uint8], start: int) -> Tensor:
    """The half-precision number at a byte of each block: [rows, blocks]."""
    return torch.from_numpy(blocks[..., start : start + 2].copy().view(np.float16)[..., 0])


def _half_bytes(packed: NDArray[np.uint8]) -> Tensor:
    """The low halves of a block's bytes come before the high ones: int8 [rows, inputs]."""
    numbers = np.concatenate((packed & 15, packed >> 4), axis=-1)
    return torch.from_numpy(numbers.reshape(len(packed), -1).view(np.int8))


_GROUPED: dict[GGMLQuantizationType, Callable[[NDArray[np.uint8]], Grouped]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
}
"""Encodings that the CPU kernels compute with as they are."""


def _names(num_layers: int) -> dict[str, str]:
    """The file's name of every tensor that a decoder may ask for."""
    stems = dict(_WHOLE_MODEL)
    for index in range(num_layers):
        stems |= {f"model.layers.{index}.{theirs}": f"blk.{index}.{ours}" for theirs, ours in _LAYER.items()}
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in stems.items() for kind in ("weight", "bias")}
