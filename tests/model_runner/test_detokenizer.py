"""Streamed text against the whole decode, cut at the earliest stop string, for tokenizers of several kinds."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from model_runner.detokenizer import Detokenizer, TextDelta
from model_runner.loading import LoadedModel

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "Der Fuchs springt über den faulen Hund, größer als zuvor.",
    "素早い茶色の狐がのろまな犬を飛び越える。素早い狐。",
    "Быстрая лиса прыгает через собаку. Лиса и собака.",
    "نص عربي قصير 😀😀👩‍👩‍👧 🇩🇪 naïve café €",
]


class Wrapped:
    """A tokenizer as the engine hands it over; counts what whole decodes cost."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.longest_decode = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest_decode = max(self.longest_decode, len(ids))
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids


def with_added_tokens(backend: Tokenizer) -> Wrapped:
    backend.add_special_tokens(["<|end|>", "<|begin|>"])
    backend.add_tokens([AddedToken("<tool é>"), AddedToken("日本")])
    return Wrapped(backend)


def byte_level() -> Wrapped:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return with_added_tokens(backend)


def bytes_only() -> Wrapped:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: rank for rank, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    return with_added_tokens(backend)


def llama_style(*, strip: bool = True) -> Wrapped:
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("o", "g"), ("▁", "▁"), ("▁▁", "▁▁"), ("ü", "b")]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [*"abcdefghijklmnopqrstuvwxyz.üé狐", "€", *("".join(merge) for merge in merges)]
    vocabulary = {piece: rank for rank, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, decoders.Strip(" ", 1, 0)] if strip else chain)
    return with_added_tokens(backend)


def of_pieces(decoder: object, pieces: list[str]) -> Wrapped:
    backend = Tokenizer(models.WordLevel({piece: rank for rank, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<|end|>"])
    return Wrapped(backend)


BYTE_LEVEL, BYTES_ONLY, LLAMA, GEMMA = byte_level(), bytes_only(), llama_style(), llama_style(strip=False)
OTHERS = {
    "metaspace": of_pieces(decoders.Metaspace(), ["▁", "▁the", "▁▁", "dog", "é", "s▁s"]),
    "wordpiece": of_pieces(decoders.WordPiece(), ["the", "##s", "dog", ".", "##狐", "do"]),
    "suffix": of_pieces(decoders.BPEDecoder(), ["the</w>", "do", "g</w>", "狐</w>", "</w>"]),
    "none": of_pieces(None, ["the", "dog", "狐", "é"]),
}
MAIN = {"byte level": BYTE_LEVEL, "bytes": BYTES_ONLY, "llama": LLAMA, "gemma": GEMMA}
ALL = MAIN | OTHERS
# Turns a whole run of bytes into U+FFFD after the fact, without a decoder of a known kind: whole characters is all that
# can be promised of it.
UNUSUAL = of_pieces(
    decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
    ["▁a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "b"],
)


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2: LoadedModel) -> Wrapped:
    return Wrapped(smollm2.tokenizer.backend)


TEXTS = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="ab €é😀狐 日本", max_size=40),
    st.lists(st.sampled_from(["the", " ", "dog", "👩‍👩‍👧", "🇩🇪", "狐", "über", "\ufffd", "\n"]), max_size=15).map(
        "".join
    ),
)
STOPS = st.lists(
    st.one_of(st.text(alphabet="ab €é😀狐t", min_size=1, max_size=5), st.text(min_size=1, max_size=4)), max_size=5
)


def chunked(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8))) if data.draw(st.booleans()) else None
    if cuts is None:
        return [[token] for token in ids]
    return [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def cut_at_stop(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """The naive model: the stop string with the earliest start wins, then the one with the earliest end."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[: start + len(stop) * include], stop


def stream(detokenizer: Detokenizer, chunks: list[list[int]]) -> tuple[str, str | None]:
    text = "".join(detokenizer.push(chunk).text for chunk in chunks)
    text += detokenizer.finish()
    return text, detokenizer.stop_string


@pytest.mark.parametrize("name", MAIN)
@given(data=st.data(), text=TEXTS, stops=STOPS, include=st.booleans())
def test_any_text_in_any_chunks_is_the_whole_decode_up_to_the_stop(
    name: str, data: st.DataObject, text: str, stops: list[str], include: bool
) -> None:
    tokenizer = MAIN[name]
    ids = tokenizer.encode(text)
    if text:
        stops = [*stops, data.draw(st.sampled_from([text[i : i + 3] for i in range(len(text))]))]
    expected = cut_at_stop(tokenizer.decode(ids), stops, include)
    detokenizer = Detokenizer(tokenizer, stops, include_stop_string=include)
    assert stream(detokenizer, chunked(data, ids)) == expected


@pytest.mark.parametrize("name", ALL)
@given(data=st.data(), stops=STOPS, skip=st.booleans(), include=st.booleans())
def test_any_tokens_at_all_are_the_whole_decode_up_to_the_stop(
    name: str, data: st.DataObject, stops: list[str], skip: bool, include: bool
) -> None:
    tokenizer = ALL[name]
    size = tokenizer.backend.get_vocab_size()
    # Ids at and beyond the vocabulary's end decode to nothing: models are padded to round numbers.
    ids = data.draw(st.lists(st.integers(0, size + 2), max_size=30))
    expected = cut_at_stop(tokenizer.decode(ids, skip), stops, include)
    assert stream(Detokenizer(tokenizer, stops, skip, include_stop_string=include), chunked(data, ids)) == expected


def ids_by_byte() -> dict[int, int]:
    """The token of each byte that occurs in UTF-8."""
    characters = [*map(chr, range(0x800)), *map(chr, range(0x800, 0xD800, 0x800)), "\uffff", "\U00010000", "\U00040000"]
    characters += ["\U00080000", "\U000c0000", "\U0010ffff"]
    return {byte: i for each in characters for byte, i in zip(each.encode(), BYTES_ONLY.encode(each), strict=True)}


IDS_BY_BYTE = ids_by_byte()


@given(st.lists(st.sampled_from(sorted(IDS_BY_BYTE)), max_size=60), st.data())
def test_any_bytes_are_what_python_makes_of_them(raw: list[int], data: st.DataObject) -> None:
    chunks = chunked(data, [IDS_BY_BYTE[byte] for byte in raw])
    assert stream(Detokenizer(BYTES_ONLY), chunks) == (bytes(raw).decode("utf-8", "replace"), None)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTES_ONLY])
@given(
    text=st.one_of(st.text(max_size=20), st.text(alphabet="a€😀狐é", max_size=20)).filter(lambda t: "\ufffd" not in t)
)
def test_a_character_comes_whole_and_with_its_last_byte(tokenizer: Wrapped, text: str) -> None:
    ids = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer)
    emitted = ""
    for count, token in enumerate(ids, start=1):
        emitted += detokenizer.push([token]).text
        assert emitted == tokenizer.decode(ids[:count]).rstrip("\ufffd")
    assert detokenizer.finish() == ""
    assert emitted == text


@given(text=st.text(alphabet="abc", max_size=60), stops=st.lists(st.text(alphabet="abc", min_size=2, max_size=6)))
def test_no_more_is_held_back_than_could_begin_a_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(BYTES_ONLY, stops)
    emitted = ""
    for count, token in enumerate(BYTES_ONLY.encode(text), start=1):
        delta = detokenizer.push([token])
        emitted += delta.text
        if delta.stop_string is not None:
            return
        held = text[len(emitted) : count]
        assert held == "" or any(stop.startswith(held) or held.startswith(stop) for stop in stops)


def test_bytes_that_never_become_a_character() -> None:
    euro = BYTES_ONLY.encode("€")
    detokenizer = Detokenizer(BYTES_ONLY)
    assert [detokenizer.push([token]).text for token in [*euro, *euro[:2], *euro[:2]]] == ["", "", "€", "", "", "�", ""]
    assert detokenizer.finish() == "�"
    assert detokenizer.finish() == ""


def byte_tokens(*values: int) -> list[int]:
    return [LLAMA.backend.token_to_id(f"<0x{value:02X}>") for value in values]


def test_a_run_of_byte_tokens_waits_for_its_end() -> None:
    detokenizer = Detokenizer(LLAMA)
    a = LLAMA.backend.token_to_id("a")
    smile = byte_tokens(*"😀".encode())
    assert [detokenizer.push([token]).text for token in [a, *smile, a]] == ["a", "", "", "", "", "😀a"]
    assert detokenizer.push(smile).text == ""
    # One invalid byte, and the decoder of this kind makes every byte of the run U+FFFD; more bytes can't undo it.
    assert detokenizer.push(byte_tokens(0xFF)).text == "�" * 5
    assert detokenizer.push(byte_tokens(0x41)).text == "�"
    assert detokenizer.push(byte_tokens(*"é".encode()[:1])).text == "�"
    assert detokenizer.push([a]).text == "a"
    assert detokenizer.push(byte_tokens(0xE2, 0x82)).text == ""
    assert detokenizer.finish() == "��"


def test_only_the_first_space_of_a_llama_text_is_stripped() -> None:
    ids = LLAMA.encode(" the dog")
    begin = LLAMA.backend.token_to_id("<|begin|>")
    assert stream(Detokenizer(LLAMA), [[begin], *([token] for token in ids)]) == (" the dog", None)
    assert stream(Detokenizer(GEMMA), [ids]) == ("  the dog", None)


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.backend.token_to_id("<|end|>"), *BYTE_LEVEL.encode("b")]
    assert stream(Detokenizer(BYTE_LEVEL), [ids]) == ("ab", None)
    assert stream(Detokenizer(BYTE_LEVEL, skip_special_tokens=False), [ids]) == ("a<|end|>b", None)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one STOP two", ["STOP"], ("one ", "STOP")),
        ("STOP", ["STOP"], ("", "STOP")),
        ("one STO", ["STOP"], ("one STO", None)),
        ("STOSTOP", ["STOP"], ("STO", "STOP")),
        ("xabcdx", ["bc", "abcd"], ("x", "abcd")),
        ("xabcx", ["bc", "abcd"], ("xa", "bc")),
        ("xabc", ["bc", "abcd"], ("xa", "bc")),
        ("xabcd", ["abcd", "ab"], ("x", "ab")),
        ("xabcq", ["xabcd", "a", "ab", "abc"], ("x", "a")),
        ("aab", ["ab", "aab", "b"], ("", "aab")),
        ("a😀b", ["😀"], ("a", "😀")),
        ("ab\ufffd", ["\ufffd"], ("ab", "\ufffd")),
        ("one\n\ntwo", ["\n\n", "\n"], ("one", "\n")),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_strings(text: str, stops: list[str], expected: tuple[str, str | None], size: int) -> None:
    ids = BYTES_ONLY.encode(text)
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    assert stream(Detokenizer(BYTES_ONLY, stops), chunks) == expected


def test_what_may_begin_a_stop_string_is_held_until_decided() -> None:
    detokenizer = Detokenizer(BYTES_ONLY, ["abcd", "bc"])
    deltas = [detokenizer.push([token]) for token in BYTES_ONLY.encode("xabxabce")]
    assert [delta.text for delta in deltas] == ["x", "", "", "abx", "", "", "", "a"]
    assert [delta.stop_string for delta in deltas] == [None] * 7 + ["bc"]


def test_a_stop_string_is_reported_with_its_last_token() -> None:
    detokenizer = Detokenizer(BYTES_ONLY, ["abcd", "ab"])
    deltas = [detokenizer.push([token]) for token in BYTES_ONLY.encode("xab")]
    assert deltas == [TextDelta("x", None), TextDelta("", None), TextDelta("", "ab")]


def test_a_decoder_of_an_unusual_kind_gives_whole_characters_too() -> None:
    detokenizer = Detokenizer(UNUSUAL)
    a, *smile, b = range(6)
    assert [detokenizer.push([token]).text for token in [a, *smile, b]] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.push(smile[:2]).text == ""
    assert detokenizer.finish() == "��"


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one STOP two", ["STOP"], ("one STOP", "STOP")),
        ("STOSTOP.", ["STOP"], ("STOSTOP", "STOP")),
        ("xabcx", ["bc", "abcd"], ("xabc", "bc")),
        ("xabcdx", ["bc", "abcd"], ("xabcd", "abcd")),
        ("one STO", ["STOP"], ("one STO", None)),
        ("a😀😀", ["😀"], ("a😀", "😀")),
    ],
)
def test_a_stop_string_that_is_part_of_the_text(
    text: str, stops: list[str], expected: tuple[str, str | None], size: int
) -> None:
    ids = BYTES_ONLY.encode(text)
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    assert stream(Detokenizer(BYTES_ONLY, stops, include_stop_string=True), chunks) == expected


@given(
    text=st.text(alphabet="ab€", max_size=30),
    min_tokens=st.integers(0, 40),
    stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=3), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_first_tokens_are_not_searched(text: str, min_tokens: int, stops: list[str], data: st.DataObject) -> None:
    ids = BYTES_ONLY.encode(text)
    # A character that the limit cuts comes with its last byte, and is searched.
    free = BYTES_ONLY.decode(ids[:min_tokens]).rstrip("\ufffd")
    rest, stop = cut_at_stop(text[len(free) :], stops)
    assert stream(Detokenizer(BYTES_ONLY, stops, unsearched_tokens=min_tokens), chunked(data, ids)) == (
        free + rest,
        stop,
    )


@given(text=TEXTS, stops=STOPS, include=st.booleans(), seed=st.integers(0, 2**32 - 1), random_ids=st.booleans())
def test_the_demo_models_tokenizer(
    smollm2_tokenizer: Wrapped, text: str, stops: list[str], include: bool, seed: int, random_ids: bool
) -> None:
    """One token at a time: joined, the whole decode; and never more than is certain, nor half a character."""
    chance = random.Random(seed)
    ids = [chance.randrange(49152) for _ in range(20)] if random_ids else smollm2_tokenizer.encode(text)
    whole = smollm2_tokenizer.decode(ids)
    expected = cut_at_stop(whole, stops, include)
    detokenizer = Detokenizer(smollm2_tokenizer, stops, include_stop_string=include)
    emitted = ""
    for token_id in ids:
        emitted += detokenizer.push([token_id]).text
        assert expected[0].startswith(emitted)
    assert (emitted + detokenizer.finish(), detokenizer.stop_string) == expected


def test_after_a_stop_nothing_comes() -> None:
    detokenizer = Detokenizer(BYTES_ONLY, ["."])
    assert detokenizer.push(BYTES_ONLY.encode("end. And more.")) == TextDelta("end", ".")
    assert detokenizer.push(BYTES_ONLY.encode("more")) == TextDelta("", ".")
    assert detokenizer.finish() == ""
    assert detokenizer.stop_string == "."


def test_a_stop_string_may_be_completed_by_what_finish_flushes() -> None:
    detokenizer = Detokenizer(LLAMA, ["a😀"])
    ids = [LLAMA.backend.token_to_id("b"), LLAMA.backend.token_to_id("a"), *byte_tokens(*"😀".encode())]
    assert detokenizer.push(ids) == TextDelta("b", None)
    assert detokenizer.finish() == ""
    assert detokenizer.stop_string == "a😀"


@pytest.mark.parametrize("size", [1, 2, 100])
def test_no_stop_string_is_looked_for_in_the_first_tokens(size: int) -> None:
    """One of the stop strings is among them, one goes over their end, one comes after."""
    ids = BYTES_ONLY.encode("abcdefghcd")
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    assert stream(Detokenizer(BYTES_ONLY, ["bc", "de", "cd"], unsearched_tokens=4), chunks) == ("abcdefgh", "cd")
    assert stream(Detokenizer(BYTES_ONLY, ["bc", "de", "cd"], unsearched_tokens=11), chunks) == ("abcdefghcd", None)


def test_nothing_pushed_is_nothing_said() -> None:
    detokenizer = Detokenizer(LLAMA, ["a"])
    assert detokenizer.push([]) == TextDelta("", None)
    assert detokenizer.finish() == ""
    assert detokenizer.stop_string is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Detokenizer(LLAMA, ["a", ""])


@pytest.mark.parametrize("name", ALL)
def test_no_decode_grows_with_the_output(name: str) -> None:
    tokenizer = Wrapped(ALL[name].backend)
    detokenizer = Detokenizer(tokenizer, ["never said"])
    size = tokenizer.backend.get_vocab_size()
    for step in range(3000):
        detokenizer.push([step * step % size])
    detokenizer.finish()
    assert tokenizer.longest_decode <= 32
