"""The tokenizer inside a GGUF file: byte-level BPE as its merges say, or SentencePiece BPE as its scores say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from model_runner.config_gguf import end_token_ids
from model_runner.errors import ModelLoadError
from model_runner.fields import Fields
from model_runner.gguf_file import GgufFile
from model_runner.tokenizer import Tokenizer, add_bos, compile_template

_SPACE = "\u2581"
_LETTERS_AND_MORE = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

_Item = TypeVar("_Item")


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class _Split:
    """How a kind of byte-level BPE cuts text into words, and what goes with it."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(numbers: str) -> pre_tokenizers.PreTokenizer:
    pattern = Regex("|".join((_CONTRACTIONS, _LETTERS_AND_MORE, numbers, _REST)))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_SPLITS = {
    "default": _Split(_gpt2_split),
    "gpt-2": _Split(_gpt2_split),
    "smollm": _Split(_smollm_split),
    "llama-bpe": _Split(lambda: _regex_split(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True),
    "qwen2": _Split(lambda: _regex_split(r"\p{N}"), nfc=True),
}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens in the order of their ids, with the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]

    @property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def of_type(self, kind: _TokenType) -> list[str]:
        return [token for token, each in zip(self.tokens, self.types, strict=True) if each == kind]


def tokenizer_from_gguf(reader: GgufFile) -> Tokenizer:
    """Builds the tokenizer. Raises ModelLoadError for a kind that is not supported, or data that does not fit."""
    fields = Fields(reader.path, reader.metadata)
    vocabulary = _vocabulary(fields)
    backend, adds_bos = _build(fields, vocabulary)
    backend.add_special_tokens(_added(vocabulary.of_type(_TokenType.CONTROL), special=True))
    backend.add_tokens(_added(vocabulary.of_type(_TokenType.USER_DEFINED), special=False))
    bos, eos = (_token_text(fields, vocabulary, f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos"))
    if bos and fields.flag("tokenizer.ggml.add_bos_token", default=adds_bos):
        add_bos(backend, bos)
    template = fields.text("tokenizer.chat_template") if fields.get("tokenizer.chat_template") is not None else None
    return Tokenizer(backend, end_token_ids(fields), compile_template(reader.path, template, bos, eos))


def _vocabulary(fields: Fields) -> _Vocabulary:
    tokens = _list_of(fields, "tokenizer.ggml.tokens", str)
    if fields.get("tokenizer.ggml.token_type") is None:
        return _Vocabulary(tokens, [_TokenType.NORMAL] * len(tokens))
    types = _list_of(fields, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelLoadError(f"{fields.path} has {len(tokens)} tokens and {len(types)} types of tokens.")
    return _Vocabulary(tokens, types)


def _build(fields: Fields, vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    """The tokenizer, and whether its kind begins a text with BOS unless told otherwise."""
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level_bpe(fields, vocabulary)
    if kind == "llama":
        return _sentencepiece_bpe(fields, vocabulary), True
    raise ModelLoadError(f"{fields.path}: the tokenizer kind {kind!r} is not supported; 'gpt2' and 'llama' are.")


def _byte_level_bpe(fields: Fields, vocabulary: _Vocabulary) -> tuple[Backend, bool]:
    pre = fields.text("tokenizer.ggml.pre", default="default")
    if pre not in _SPLITS:
        raise ModelLoadError(
            f"{fields.path}: the pre-tokenizer kind {pre!r} is not supported; {', '.join(_SPLITS)} are."
        )
    split = _SPLITS[pre]
    # The first character of a merge's left part may itself be a space.
    merges = [_halves(merge, merge.find(" ", 1)) for merge in _list_of(fields, "tokenizer.ggml.merges", str)]
    backend = Backend(_bpe(fields, vocabulary.ids, merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _halves(merge: str, space: int) -> tuple[str, str]:
    return merge[:space], merge[space + 1 :]


def _sentencepiece_bpe(fields: Fields, vocabulary: _Vocabulary) -> Backend:
    scores = _list_of(fields, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise ModelLoadError(f"{fields.path} has {len(vocabulary.tokens)} tokens and {len(scores)} scores.")
    unknown = _token_text(fields, vocabulary, "tokenizer.ggml.unknown_token_id") or None
    merges = _merges_by_score(vocabulary, scores)
    backend = Backend(_bpe(fields, vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", default=True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose whole has the best score: so, every way to make a token, best first."""
    score_of = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores, strict=True)
        if kind == _TokenType.NORMAL
    }
    merges = [
        (-score, token[:cut], token[cut:])
        for token, score in score_of.items()
        for cut in range(1, len(token))
        if token[:cut] in score_of and token[cut:] in score_of
    ]
    # Among ways to make the same token the shorter left part comes first, as it would be met first in a text.
    merges.sort(key=lambda merge: (merge[0], len(merge[1])))
    return [(left, right) for _, left, right in merges]


def _bpe(fields: Fields, ids: dict[str, int], merges: list[tuple[str, str]], **options: object) -> BPE:
    try:
        return BPE(vocab=ids, merges=merges, **options)
    except Exception as error:
        # The library raises bare Exception for merges of tokens that are not there.
        raise ModelLoadError(f"{fields.path}: the tokenizer's merges do not fit its tokens: {error}.") from None


def _added(tokens: Sequence[str], special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def _token_text(fields: Fields, vocabulary: _Vocabulary, key: str) -> str:
    """The text of the token whose id is under `key`, or "" when there is none."""
    token_id = fields.token_id(key)
    if token_id is None:
        return ""
    if token_id >= len(vocabulary.tokens):
        raise fields.wrong(key, f"a token id below {len(vocabulary.tokens)}")
    return vocabulary.tokens[token_id]


def _list_of(fields: Fields, key: str, kind: type[_Item]) -> list[_Item]:
    value = fields.get(key)
    if value is None:
        raise ModelLoadError(f"{fields.path}: {key} is missing.")
    if not isinstance(value, list) or not value or not isinstance(value[0], kind):
        raise fields.wrong(key, f"a list of {kind.__name__}")
    return value
