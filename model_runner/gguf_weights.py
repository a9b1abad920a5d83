"""The tensors of a GGUF file, dequantised, under the names and in the row order of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from model_runner.config import ModelConfig
from model_runner.errors import ModelLoadError
from model_runner.gguf_file import GgufFile

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
        array = self._dequantized(self._names[name])
        if self._interleaved and ".q_proj." in name:
            array = self._in_halves(name, array, self._config.num_heads)
        if self._interleaved and ".k_proj." in name:
            array = self._in_halves(name, array, self._config.num_kv_heads)
        return torch.from_numpy(array)

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

    def _in_halves(self, name: str, array: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
        """Puts the first of each rotated pair in the first half of its head, the second in the second half."""
        if len(array) % (2 * num_heads):
            raise ModelLoadError(
                f"{self._reader.path}: the {len(array)} rows of {name} cannot be divided among {num_heads} heads."
            )
        pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _names(num_layers: int) -> dict[str, str]:
    """The file's name of every tensor that a decoder may ask for."""
    stems = dict(_WHOLE_MODEL)
    for index in range(num_layers):
        stems |= {f"model.layers.{index}.{theirs}": f"blk.{index}.{ours}" for theirs, ours in _LAYER.items()}
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in stems.items() for kind in ("weight", "bias")}
