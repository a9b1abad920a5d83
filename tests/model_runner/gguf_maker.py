"""Writes small GGUF files as llama.cpp's converter would, from the safetensors of tests/data/tiny."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Encoding
from safetensors.numpy import load_file

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
# All bytes, as byte-level BPE spells them, are more than the tiny models have room for.
TOKENS = ["<s>", "</s>", "<|im_start|>", *(chr(code) for code in range(33, 127)), "\u0120", "\u010a", "Th", "Thi"]
TOKENS += [f"[PAD{index}]" for index in range(128 - len(TOKENS))]
TOKEN_TYPES = [3, 3, 3, *[1] * (len(TOKENS) - 3)]
TINY_HEADS = 4


def gguf_name(name: str) -> str:
    """model.layers.1.mlp.up_proj.weight -> blk.1.ffn_up.weight."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order that the converter gives to q and k of the architecture 'llama'."""
    return array.reshape(num_heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def tiny_metadata(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    """The metadata of tests/data/tiny/llama; a change to None leaves a key out, __ stands for a dot."""
    metadata = {
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": 32,
        f"{arch}.block_count": 2,
        f"{arch}.feed_forward_length": 48,
        f"{arch}.attention.head_count": TINY_HEADS,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 500.0,
        f"{arch}.rope.dimension_count": 8,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.merges": ["T h", "Th i"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return {key: value for key, value in metadata.items() if value is not None}


def tiny_tensors(folder: Path, interleaved: bool = True) -> dict[str, np.ndarray]:
    """The tensors of a model in tests/data/tiny under their GGUF names."""
    tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        if interleaved and (".q_proj." in name or ".k_proj." in name):
            array = interleave(array, TINY_HEADS if ".q_proj." in name else 2)
        tensors[gguf_name(name)] = array
    return tensors


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    arch: str = "llama",
    encoding: Encoding = Encoding.F32,
) -> Path:
    """Writes the file, matrices in `encoding`; whole numbers as uint32, others as float32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        kind = encoding if array.ndim == 2 else Encoding.F32
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
