"""Turning token ids into text as they come: only what no later token can change, and exactly what decode() gives.

Decoding the last few tokens again and again is not exact: what a byte means depends on bytes before and after it.
So the two decoders that models use are followed here, token by token; any other goes through a window of tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# A character has at most 4 bytes, hence 4 tokens; the rest leaves room for invalid bytes before it.
_WINDOW_LIMIT = 16


class Tokenizer(Protocol):
    """What is needed of a tokenizer; `decode` is that of its backend."""

    @property
    def backend(self) -> Backend:
        """The tokenizers.Tokenizer underneath."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of all of `ids`."""
        ...


class TokenText(Protocol):
    """The text of one growing list of token ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds tokens; returns the text that is certain now and was not returned before."""
        ...

    def finish(self) -> str:
        """The rest of the text, with U+FFFD for bytes that never became a character."""
        ...

    def copy(self) -> TokenText:
        """The same text so far; from now on each grows by itself."""
        ...


def token_text(tokenizer: Tokenizer, skip_special_tokens: bool, *, strip: bool = True) -> TokenText:
    """The right TokenText for the tokenizer's decoder, at no token yet. Special tokens leave no text when skipped.

    strip: as decode() does, drop the space that tokenizers of the SentencePiece kind put before a text.
    """
    vocabulary = _vocabulary(tokenizer.backend, skip_special_tokens)
    if vocabulary.kind == "byte_level":
        return _ByteLevelText(vocabulary)
    if vocabulary.kind == "byte_fallback":
        return _ByteFallbackText(vocabulary, vocabulary.leading_spaces if strip else 0)
    return _WindowedText(tokenizer, vocabulary, skip_special_tokens)


def bytes_of_tokens(tokenizer: Tokenizer, vocab_size: int) -> list[bytes] | None:
    """What each token id adds to a text, nothing for special and unknown ones; the text is all of it, joined.

    None where a token's bytes depend on its neighbours, as with the decoders that need a window.
    """
    vocabulary = _vocabulary(tokenizer.backend, skip_special_tokens=True)
    if vocabulary.kind == "byte_level":
        return [vocabulary.bytes_of(token_id) for token_id in range(vocab_size)]
    if vocabulary.kind == "byte_fallback":
        return [_as_bytes(vocabulary.byte_or_text(token_id)) for token_id in range(vocab_size)]
    return None


def _as_bytes(piece: int | str | None) -> bytes:
    return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()


class _Vocabulary:
    """What each token adds to the text, looked up once per id and shared by all texts of one tokenizer."""

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        special = (token.content for token in backend.get_added_tokens_decoder().values() if token.special)
        self._hidden = frozenset(special) if skip_special_tokens else frozenset()
        chain = _decoder_chain(backend)
        self.kind = _kind(chain)
        self._replacements = [(each["pattern"]["String"], each["content"]) for each in chain if _is_replacement(each)]
        self.leading_spaces = sum(each["start"] for each in chain if each["type"] == "Strip")
        self._bytes: dict[int, bytes] = {}
        self._pieces: dict[int, int | str | None] = {}

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for one that leaves no trace: unknown, or special and skipped."""
        piece = self._backend.id_to_token(token_id)
        return None if piece in self._hidden else piece

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes under the byte-level alphabet; a token not spelled in it stands for its own UTF-8."""
        known = self._bytes.get(token_id)
        if known is None:
            piece = self.piece(token_id) or ""
            spelled = all(character in _BYTE_OF for character in piece)
            known = bytes(map(_BYTE_OF.__getitem__, piece)) if spelled else piece.encode()
            self._bytes[token_id] = known
        return known

    def byte_or_text(self, token_id: int) -> int | str | None:
        """The byte that a byte token such as <0xE2> stands for, or another token's text; None as for piece()."""
        if token_id not in self._pieces:
            self._pieces[token_id] = self._byte_or_text(self.piece(token_id))
        return self._pieces[token_id]

    def _byte_or_text(self, piece: str | None) -> int | str | None:
        if piece is None:
            return None
        for pattern, content in self._replacements:
            piece = piece.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(piece)
        return int(match[1], 16) if match else piece


@lru_cache(maxsize=4)
def _vocabulary(backend: Backend, skip_special_tokens: bool) -> _Vocabulary:
    return _Vocabulary(backend, skip_special_tokens)


def _decoder_chain(backend: Backend) -> list[dict[str, Any]]:
    """The settings of the tokenizer's decoder, a sequence as its parts; empty for no decoder."""
    if backend.decoder is None:
        return []
    settings = json.loads(backend.decoder.__getstate__())
    return settings["decoders"] if settings["type"] == "Sequence" else [settings]


def _kind(chain: list[dict[str, Any]]) -> str:
    """Which way to follow a decoder: "byte_level", "byte_fallback" (as in Llama 2, Mistral and Gemma) or "window"."""
    if [each["type"] for each in chain] == ["ByteLevel"]:
        return "byte_level"
    while chain and _is_replacement(chain[0]):
        chain = chain[1:]
    rest = [each["type"] for each in chain]
    if rest == ["ByteFallback", "Fuse"]:
        return "byte_fallback"
    if rest == ["ByteFallback", "Fuse", "Strip"] and chain[2]["content"] == " " and chain[2]["stop"] == 0:
        return "byte_fallback"
    return "window"


def _is_replacement(settings: dict[str, Any]) -> bool:
    return settings["type"] == "Replace" and "String" in settings["pattern"]


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, other bytes for U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


class _ByteLevelText:
    """All tokens are bytes of one UTF-8 string."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._vocabulary.bytes_of, token_ids)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def copy(self) -> _ByteLevelText:
        twin = copy(self)
        twin._decoder = copy(self._decoder)
        return twin


class _ByteFallbackText:
    """Text tokens, and between them runs of byte tokens."""

    def __init__(self, vocabulary: _Vocabulary, spaces_to_strip: int) -> None:
        self._vocabulary = vocabulary
        self._run = _ByteRun()
        self._spaces_to_strip = spaces_to_strip

    def push(self, token_ids: Sequence[int]) -> str:
        return self._strip("".join(map(self._take, token_ids)))

    def finish(self) -> str:
        return self._strip(self._run.end())

    def copy(self) -> _ByteFallbackText:
        twin = copy(self)
        twin._run = self._run.copy()
        return twin

    def _take(self, token_id: int) -> str:
        piece = self._vocabulary.byte_or_text(token_id)
        if piece is None:
            return ""
        return self._run.add(piece) if isinstance(piece, int) else self._run.end() + piece

    def _strip(self, text: str) -> str:
        while text and self._spaces_to_strip:
            if text[0] != " ":
                self._spaces_to_strip = 0
                break
            text, self._spaces_to_strip = text[1:], self._spaces_to_strip - 1
        return text


class _ByteRun:
    """Byte tokens in a row. The decoder makes each byte of a run U+FFFD if any is invalid, so a run waits for its end.

    An invalid run need not wait: its end can change nothing.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._characters: list[str] = []
        self._length = 0
        self._broken = False

    def add(self, byte: int) -> str:
        """Adds one byte; returns the text that is certain now."""
        if self._broken:
            return REPLACEMENT
        self._length += 1
        try:
            self._characters.append(self._decoder.decode(bytes([byte])))
        except UnicodeDecodeError:
            self._broken = True
            return REPLACEMENT * self._length
        return ""

    def end(self) -> str:
        """Ends the run, if there is one, and returns what it kept waiting."""
        if self._length == 0:
            return ""
        unfinished, _ = self._decoder.getstate()
        text = REPLACEMENT * self._length if unfinished else "".join(self._characters)
        kept = "" if self._broken else text
        self._start()
        return kept

    def copy(self) -> _ByteRun:
        twin = copy(self)
        twin._decoder, twin._characters = copy(self._decoder), self._characters[:]
        return twin


class _WindowedText:
    """Any other decoder: decodes the newest tokens after those before them, and takes the difference.

    Exact for decoders that look back one token and hold back no more than an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: _Vocabulary, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._take, token_ids))

    def finish(self) -> str:
        return self._release(self._decode(self._context + self._pending)) if self._pending else ""

    def copy(self) -> _WindowedText:
        twin = copy(self)
        twin._pending = self._pending[:]
        return twin

    def _take(self, token_id: int) -> str:
        # Tokens without a trace must not become the context: what follows them would look like the beginning.
        if self._vocabulary.piece(token_id) is None:
            return ""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and len(self._pending) < _WINDOW_LIMIT:
            return ""
        return self._release(text)

    def _release(self, text: str) -> str:
        before = len(self._decode(self._context)) if self._context else 0
        self._context, self._pending = self._pending, []
        return text[before:]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)
