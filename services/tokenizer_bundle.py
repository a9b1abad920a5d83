"""A model's tokenizer as a zip of the files that Hugging Face tokenizers are read from, made from what is loaded."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from model_runner.config import ModelConfig
from model_runner.json_file import read_object
from model_runner.tokenizer import Tokenizer

CHUNK_BYTES = 64 * 1024
"""Of the archive in one message, at most."""

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file in the archive, so that equal contents have equal digests."""


def architecture_name(config: ModelConfig) -> str:
    """The class in transformers that has this architecture."""
    return _ARCHITECTURES[config.architecture]


def tokenizer_files(tokenizer: Tokenizer, config: ModelConfig, directory: Path | None) -> dict[str, str]:
    """The files by name. directory: that of a Hugging Face model, whose other settings are kept; None for a GGUF."""
    settings = _read(directory, "tokenizer_config.json") or _settings(tokenizer, config)
    if tokenizer.chat_template is not None:
        # The one that is used here, wherever it came from: readers differ in where they look.
        settings["chat_template"] = tokenizer.chat_template.source
    files = {
        "tokenizer.json": tokenizer.backend.to_str(),
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False),
        "config.json": json.dumps(_read(directory, "config.json") or _config(config)),
    }
    generation = _read(directory, "generation_config.json")
    return files | ({"generation_config.json": json.dumps(generation)} if generation else {})


def zipped(files: dict[str, str]) -> bytes:
    """The archive. Equal files make equal bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(files.items()):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, text)
    return buffer.getvalue()


def pieces(archive: bytes) -> Iterator[tuple[bytes, str]]:
    """The archive in parts of CHUNK_BYTES at most, the last one with the SHA-256 of all of it, the others with ''."""
    digest = hashlib.sha256(archive).hexdigest()
    for start in range(0, len(archive), CHUNK_BYTES):
        end = start + CHUNK_BYTES
        yield archive[start:end], digest if end >= len(archive) else ""


def _read(directory: Path | None, name: str) -> dict[str, Any]:
    if directory is None or not (directory / name).exists():
        return {}
    return dict(read_object(directory / name))


def _settings(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, Any]:
    ends = tokenizer.eos_token_ids or config.eos_token_ids
    tokens = {"bos_token": config.bos_token_id, "eos_token": ends[0] if ends else None}
    named = {name: tokenizer.backend.id_to_token(token_id) for name, token_id in tokens.items() if token_id is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}


def _config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [architecture_name(config)],
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
    }
