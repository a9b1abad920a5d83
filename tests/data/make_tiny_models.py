"""Makes tests/data/tiny/: random models of each family, with the logits that transformers computes for them.

Run it in a virtual environment of its own, from the repository's root:

    python3 -m venv /tmp/hf
    /tmp/hf/bin/pip install "transformers==5.24.0" "torch==2.13.0" numpy safetensors
    /tmp/hf/bin/python tests/data/make_tiny_models.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TARGET = Path(__file__).parent / "tiny"
PROMPT_LENGTHS = (1, 5, 8, 9, 23, 40)
COMMON = {
    "vocab_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def models() -> dict[str, PreTrainedModel]:
    """One for each family, and for each feature that a family may have."""
    small = {**COMMON, "hidden_size": 32, "intermediate_size": 48}
    return {
        "llama": LlamaForCausalLM(LlamaConfig(**small, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False)),
        "llama_linear": LlamaForCausalLM(
            LlamaConfig(
                **{**small, "num_key_value_heads": 4},
                rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
                tie_word_embeddings=True,
            )
        ),
        "mistral": MistralForCausalLM(MistralConfig(**small, head_dim=16, sliding_window=8)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**small, tie_word_embeddings=True)),
        "qwen2_window": Qwen2ForCausalLM(
            Qwen2Config(**small, use_sliding_window=True, sliding_window=8, max_window_layers=0)
        ),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**{**small, "hidden_size": 48}, head_dim=16)),
        "sharded": LlamaForCausalLM(LlamaConfig(**small, rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    }


def randomise(model: PreTrainedModel) -> None:
    """Weights large enough that attention is far from uniform, biases and norms away from 0 and 1."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else noise * (3 / parameter.shape[-1]) ** 0.5


@torch.no_grad()
def golden(model: PreTrainedModel) -> list[dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(11)
    items = []
    for length in PROMPT_LENGTHS:
        ids = torch.randint(0, 128, (1, length), generator=generator)
        logits = model(ids, use_cache=False).logits[0, -1].float()
        items.append({"token_ids": ids[0].tolist(), "logits": [round(value, 6) for value in logits.tolist()]})
    return items


def main() -> None:
    shutil.rmtree(TARGET, ignore_errors=True)
    for name, model in models().items():
        model.eval()
        randomise(model)
        folder = TARGET / name
        model.save_pretrained(folder, max_shard_size="20KB" if name == "sharded" else "1GB")
        (folder / "golden.json").write_text(json.dumps(golden(model)) + "\n")


if __name__ == "__main__":
    main()
