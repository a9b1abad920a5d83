"""Tokenizers of Hugging Face directories and GGUF files, against recorded ids and an independent merge."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from model_runner.chat_template import ChatTemplateError
from model_runner.errors import ModelLoadError
from model_runner.gguf_file import GgufFile
from model_runner.gguf_tokenizer import tokenizer_from_gguf
from model_runner.loading import LoadedModel
from model_runner.token_text import token_text
from model_runner.tokenizer import Tokenizer, tokenizer_from_hf
from tests.model_runner.gguf_maker import TOKENS, tiny_metadata, write_gguf

NO_TENSORS = {"token_embd.weight": np.zeros((128, 32), dtype=np.float32)}


def from_gguf(folder: Path, **changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(GgufFile(write_gguf(folder / "t.gguf", tiny_metadata(**changes), NO_TENSORS)))


@pytest.mark.parametrize("index", range(20))
def test_golden_prompts(smollm2: LoadedModel, golden_smollm2: list[dict[str, Any]], index: int) -> None:
    item, tokenizer = golden_smollm2[index], smollm2.tokenizer
    assert tokenizer.encode(item["prompt"]) == item["prompt_token_ids"]
    assert tokenizer.encode(item["prompt"], add_special_tokens=False) == item["prompt_token_ids"]
    assert tokenizer.decode(item["output_ids"]) == item["text"]
    if "messages" in item:
        assert tokenizer.render_chat(item["messages"]) == item["prompt"]


def test_there_are_20_golden_items(golden_smollm2: list[dict[str, Any]]) -> None:
    assert len(golden_smollm2) == 20
    assert sum("messages" in item for item in golden_smollm2) > 0


def test_smollm2(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    # Its own settings: BOS is <|im_start|>, and is not added.
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<|im_start|>user") == [1, 4093]
    assert tokenizer.decode([1, 4093, 2]) == "<|im_start|>user<|im_end|>"
    assert tokenizer.decode([1, 4093, 2], skip_special_tokens=True) == "user"


@pytest.mark.parametrize(
    "text", ["", " ", "  two  spaces\n\n\ttab", "naïve 日本語 🎉", "x" * 5000, "2024-01-31", "\r\n", "\x7f"]
)
def test_text_comes_back(smollm2: LoadedModel, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_digits_are_tokens_each(smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer.encode("1234567890")
    assert [smollm2.tokenizer.decode([each]) for each in ids] == list("1234567890")


def test_merges_make_the_tokens(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path)
    assert tokenizer.encode("This") == [TOKENS.index("Thi"), TOKENS.index("s")]
    assert tokenizer.decode(tokenizer.encode("a This\n")) == "a This\n"
    assert tokenizer.vocab_size == 128
    assert tokenizer.eos_token_ids == (1,)
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("changes", "begins"),
    [
        ({}, False),
        ({"tokenizer__ggml__add_bos_token": True}, True),
        ({"tokenizer__ggml__add_bos_token": False}, False),
        ({"tokenizer__ggml__pre": "llama-bpe"}, True),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, False),
        ({"tokenizer__ggml__pre": "qwen2"}, False),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__bos_token_id": None}, False),
    ],
)
def test_bos_only_if_the_settings_say_so(tmp_path: Path, changes: dict[str, Any], begins: bool) -> None:
    tokenizer = from_gguf(tmp_path, **changes)
    assert tokenizer.encode("a") == [0] * begins + [TOKENS.index("a")]
    assert tokenizer.encode("a", add_special_tokens=False) == [TOKENS.index("a")]
    assert tokenizer.encode("<s>a", add_special_tokens=False) == [0, TOKENS.index("a")]


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    """How the text is cut before it is merged."""
    return [text[start:end] for _, (start, end) in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        (None, ["It", "'s", " 12345", " (", "fine", "),", " I", "'", "LL", "  ", " go", "\n\n"]),
        ("default", ["It", "'s", " 12345", " (", "fine", "),", " I", "'", "LL", "  ", " go", "\n\n"]),
        ("gpt-2", ["It", "'s", " 12345", " (", "fine", "),", " I", "'", "LL", "  ", " go", "\n\n"]),
        (
            "smollm",
            ["It", "'s", " ", "1", "2", "3", "4", "5", " (", "fine", "),", " I", "'", "LL", "  ", " go", "\n\n"],
        ),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " (", "fine", "),", " I", "'LL", "  ", " go", "\n\n"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " (", "fine", "),", " I", "'LL", "  ", " go", "\n\n"]),
    ],
)
def test_kinds_of_pre_tokenizer(tmp_path: Path, pre: str | None, expected: list[str]) -> None:
    assert words(from_gguf(tmp_path, tokenizer__ggml__pre=pre), "It's 12345 (fine), I'LL   go\n\n") == expected


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, tokenizer__ggml__pre="qwen2")
    assert tokenizer.backend.normalizer.normalize_str("e\u0301") == "\u00e9"


def test_user_defined_tokens_are_kept_when_special_ones_are_skipped(tmp_path: Path) -> None:
    types = [3, 3, 4, *[1] * 125]
    tokenizer = from_gguf(tmp_path, tokenizer__ggml__token_type=types)
    ids = tokenizer.encode("a<|im_start|></s>")
    assert ids == [TOKENS.index("a"), 2, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|im_start|>"


def test_chat_template_of_a_gguf(tmp_path: Path) -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = from_gguf(tmp_path, tokenizer__chat_template=source)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<s>hi</s>"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokenizer__ggml__model": "t5"}, "tokenizer kind 't5' is not supported"),
        ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer__ggml__pre": "deepseek-llm"}, "pre-tokenizer kind 'deepseek-llm' is not supported"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__tokens": [1, 2]}, "tokenizer.ggml.tokens is [1, 2]"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "128 tokens and 2 types"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__merges": ["Th ree"]}, "merges do not fit"),
        ({"tokenizer__ggml__merges": ["Th"]}, "merges do not fit"),
        ({"tokenizer__ggml__bos_token_id": 128}, "bos_token_id is 128"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": [0.5]}, "128 tokens and 1 scores"),
        ({"tokenizer__chat_template": "{% if %}"}, "chat template has an error in line 1"),
    ],
)
def test_gguf_tokenizers_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        from_gguf(tmp_path, **changes)
    assert sentence in str(refusal.value)
    assert "t.gguf" in str(refusal.value)


# A SentencePiece vocabulary: <unk>, <s>, </s>, a chat token, all bytes, then pieces with distinct scores.
SPM_SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{byte:02X}>" for byte in range(256))]
SPM_LETTERS = ["\u2581", "a", "b", "c", "é"]


def spm_pieces() -> list[str]:
    """Random pieces over few letters, so that many merges compete."""
    dice = random.Random(17)
    pieces = {"".join(dice.choices("\u2581abc", k=dice.choice([2, 2, 3, 3, 4]))) for _ in range(120)}
    return sorted(pieces - set(SPM_LETTERS), key=lambda piece: dice.random())


SPM_TOKENS = [*SPM_SPECIAL, *spm_pieces(), *SPM_LETTERS]
SPM_SCORES = [0.0] * len(SPM_SPECIAL) + [-float(index) for index in range(len(SPM_TOKENS) - len(SPM_SPECIAL))]
SPM_TYPES = [2, 3, 3, 4, *[6] * 256, *[1] * (len(SPM_TOKENS) - len(SPM_SPECIAL))]
SPM = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__pre": None,
    "tokenizer__ggml__merges": None,
    "tokenizer__ggml__tokens": SPM_TOKENS,
    "tokenizer__ggml__scores": SPM_SCORES,
    "tokenizer__ggml__token_type": SPM_TYPES,
    "tokenizer__ggml__bos_token_id": 1,
    "tokenizer__ggml__eos_token_id": 2,
    "tokenizer__ggml__unknown_token_id": 0,
}


def naive_spm(text: str) -> list[int]:
    """Merges the neighbours whose whole has the best score, the leftmost of equals, until there are none."""
    score_of = dict(zip(SPM_TOKENS[len(SPM_SPECIAL) :], SPM_SCORES[len(SPM_SPECIAL) :], strict=True))
    symbols = list(("\u2581" + text).replace(" ", "\u2581")) if text else []
    while True:
        wholes = [left + right for left, right in pairwise(symbols)]
        known = [(-score_of[whole], index) for index, whole in enumerate(wholes) if whole in score_of]
        if not known:
            break
        _, index = min(known)
        symbols[index : index + 2] = [wholes[index]]
    return [each for symbol in symbols for each in naive_ids(symbol, score_of)]


def naive_ids(symbol: str, score_of: dict[str, float]) -> list[int]:
    if symbol in score_of:
        return [SPM_TOKENS.index(symbol)]
    return [SPM_TOKENS.index(f"<0x{byte:02X}>") for byte in symbol.encode()]


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return from_gguf(tmp_path_factory.mktemp("spm"), **SPM)


def test_spm_is_the_naive_merge(spm: Tokenizer) -> None:
    dice = random.Random(23)
    for _ in range(1500):
        text = "".join(dice.choices("aaabbbcc  é日\n", k=dice.randrange(1, 40)))
        assert spm.encode(text, add_special_tokens=False) == naive_spm(text), repr(text)


def test_spm_text_comes_back(spm: Tokenizer) -> None:
    for text in ["abc", " abc", "a  b", "日本\n", "é🎉", ""]:
        assert spm.encode(text) == [1, *naive_spm(text)]
        assert spm.decode(spm.encode(text), skip_special_tokens=True) == text
    assert spm.encode("<|user|>", add_special_tokens=False) == [3]


def test_spm_without_the_space_in_front(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, **SPM, tokenizer__ggml__add_space_prefix=False)
    assert tokenizer.encode("é", add_special_tokens=False) == [SPM_TOKENS.index("é")]
    assert tokenizer.decode(tokenizer.encode(" é", add_special_tokens=False)) == " é"


def test_spm_streams_what_it_decodes(spm: Tokenizer) -> None:
    ids = spm.encode("a 日本 b\n🎉", add_special_tokens=False)
    stream = token_text(spm, skip_special_tokens=False)
    pieces = [stream.push([each]) for each in ids]
    assert "".join(pieces) + stream.finish() == spm.decode(ids)


@pytest.fixture
def hf_folder(smollm2: LoadedModel, tmp_path: Path) -> Path:
    """SmolLM2's tokenizer as a directory of Hugging Face would have it."""
    smollm2.tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder: Path, **settings: Any) -> Tokenizer:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer_from_hf(folder)


def test_hf_directory(hf_folder: Path, golden_smollm2: list[dict[str, Any]]) -> None:
    template = "{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}"
    eos = {"content": "<|im_end|>", "lstrip": False, "special": True}
    tokenizer = configure(hf_folder, bos_token="<|im_start|>", eos_token=eos, chat_template=template)
    for item in golden_smollm2:
        assert tokenizer.encode(item["prompt"]) == item["prompt_token_ids"]
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"


def test_hf_without_settings(hf_folder: Path) -> None:
    tokenizer = tokenizer_from_hf(hf_folder)
    assert (tokenizer.eos_token_ids, tokenizer.chat_template) == ((), None)


def test_hf_template_file_comes_first(hf_folder: Path) -> None:
    (hf_folder / "chat_template.jinja").write_text("from the file")
    assert configure(hf_folder, chat_template="from the settings").render_chat([]) == "from the file"


def test_hf_templates_by_name(hf_folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert configure(hf_folder, chat_template=named).render_chat([]) == "plain"


def test_hf_add_bos_token(hf_folder: Path) -> None:
    plain = configure(hf_folder, bos_token="<|im_start|>").encode("user")
    assert plain == [4093]
    wanting = configure(hf_folder, bos_token="<|im_start|>", add_bos_token=True)
    assert wanting.encode("user") == [1, 4093]
    wanting.backend.save(str(hf_folder / "tokenizer.json"))
    assert configure(hf_folder, bos_token="<|im_start|>").encode("user") == [1, 4093]
    assert configure(hf_folder, bos_token="<|im_start|>", add_bos_token=False).encode("user") == [4093]


def test_hf_padding_and_truncation_are_off(hf_folder: Path) -> None:
    backend = Backend.from_file(str(hf_folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    backend.save(str(hf_folder / "tokenizer.json"))
    assert len(tokenizer_from_hf(hf_folder).encode("one two three four five")) == 5


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b"\xff\xff", b'{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json [^\n]*\.$"):
        tokenizer_from_hf(tmp_path)


def test_missing_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        tokenizer_from_hf(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_damaged_settings(hf_folder: Path, name: str) -> None:
    (hf_folder / name).write_text("{% for")
    with pytest.raises(ModelLoadError):
        tokenizer_from_hf(hf_folder)
