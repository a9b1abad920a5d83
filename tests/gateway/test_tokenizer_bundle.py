"""The tokenizer of a GGUF file as files: what reads them makes the recorded tokens and prompts of them."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from model_runner.config_gguf import config_from_gguf
from model_runner.config_hf import config_from_hf
from model_runner.gguf_file import GgufFile
from model_runner.gguf_tokenizer import tokenizer_from_gguf
from model_runner.loading import demo_model_path
from model_runner.tokenizer import tokenizer_from_hf
from services.tokenizer_bundle import pieces, tokenizer_files, zipped
from tests.e2e.stack import golden_items
from tests.e2e.tiny_chat_model import write_tiny_chat_model


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reader = GgufFile(demo_model_path())
    archive = zipped(tokenizer_files(tokenizer_from_gguf(reader), config_from_gguf(reader), None))
    directory = tmp_path_factory.mktemp("bundle")
    zipfile.ZipFile(io.BytesIO(archive)).extractall(directory)
    return directory


@pytest.mark.parametrize("item", golden_items(), ids=lambda item: item["prompt"][:20])
def test_the_library_makes_the_recorded_tokens(unpacked: Path, item: dict[str, Any]) -> None:
    library = Library.from_file(str(unpacked / "tokenizer.json"))
    assert library.encode(item["prompt"], add_special_tokens=False).ids == item["prompt_token_ids"]
    assert library.decode(item["output_ids"], skip_special_tokens=False) == item["text"]


def test_the_chat_template_makes_the_recorded_prompts(unpacked: Path) -> None:
    tokenizer = tokenizer_from_hf(unpacked)
    for item in golden_items():
        if item["kind"] == "chat":
            assert tokenizer.render_chat(item["messages"]) == item["prompt"]


def test_the_settings_name_the_tokens_that_begin_and_end(unpacked: Path) -> None:
    settings = json.loads((unpacked / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    config = json.loads((unpacked / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (config["vocab_size"], config["max_position_embeddings"], config["eos_token_id"]) == (49152, 8192, [2])


def test_a_hugging_face_model_keeps_its_settings(tmp_path: Path) -> None:
    directory = write_tiny_chat_model(tmp_path / "tiny")
    (directory / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 2}')
    tokenizer = tokenizer_from_hf(directory)
    files = tokenizer_files(tokenizer, config_from_hf(directory), directory)
    assert json.loads(files["config.json"]) == json.loads((directory / "config.json").read_text())
    assert json.loads(files["generation_config.json"])["temperature"] == 0.5
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == tokenizer.chat_template.source


def test_equal_files_make_equal_archives() -> None:
    first, second = zipped({"a": "1", "b": "2"}), zipped({"b": "2", "a": "1"})
    assert first == second
    assert list(pieces(b"")) == []
