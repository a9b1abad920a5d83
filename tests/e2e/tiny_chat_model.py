"""A random model of the Llama family that a test can write in a moment: it reads any text byte by byte, and chats."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
VOCAB_SIZE = 256 + len(SPECIAL)
EOS_TOKEN_ID = 257
MAX_TOKENS = 512
"""Of one sequence."""

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM, _LAYERS = 32, 48, 4, 2, 8, 2
_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no such role: ' ~ message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_chat_model(directory: Path) -> Path:
    """Writes config, weights and tokenizer; the same ones each time. Returns the directory."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_TOKENS,
        "bos_token_id": 256,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors")
    _tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (2.0 / columns**0.5)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": matrix(VOCAB_SIZE, _HIDDEN),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}."
        weights |= {
            f"{name}input_layernorm.weight": torch.ones(_HIDDEN),
            f"{name}post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{name}self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{name}self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{name}mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{name}mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    return weights


def _tokenizer() -> Tokenizer:
    vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    return tokenizer
