"""Each way a request can be wrong, the requests at the edge of it that run, and the sentences."""

from __future__ import annotations

import dataclasses
import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.invalid import InvalidRequest
from model_runner.request import BeamSearch, GenerateRequest, Retention, SamplingParams, StopConditions
from model_runner.validation import Limits, check_text_size, validate
from model_runner.validation_sampling import check_bad_words

LIMITS = Limits(vocab_size=1000, max_sequence_tokens=64)
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
STOP = {field.name for field in dataclasses.fields(StopConditions)}
RETENTION = {field.name for field in dataclasses.fields(Retention)}
BEAM_SEARCH = {field.name for field in dataclasses.fields(BeamSearch)}
REQUEST = {field.name for field in dataclasses.fields(GenerateRequest)}


def request_with(field: str, value: object) -> GenerateRequest:
    """A good request with one field, of whichever of the five dataclasses, replaced."""
    request = GenerateRequest("r-1", (1, 2, 3))
    if field in SAMPLING:
        return dataclasses.replace(request, sampling=SamplingParams(**{field: value}))
    if field in STOP:
        return dataclasses.replace(request, stop=StopConditions(**{field: value}))
    if field in BEAM_SEARCH:
        return dataclasses.replace(request, beam_search=BeamSearch(**{"width": 2, field: value}))
    if field in RETENTION:
        return dataclasses.replace(request, retention=Retention(**{field: value}))
    return dataclasses.replace(request, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt_token_ids", (), ["empty", "at least 1"]),
        ("prompt_token_ids", (1,) * 65, ["65", "64", "shorten", "by 1 "]),
        ("prompt_token_ids", (1,) * 100_000, ["100000", "64", "by 99936 "]),
        ("prompt_token_ids", (5, -1, 5000), ["token 1 ", "is -1", "0 to 999"]),
        ("prompt_token_ids", (5, 6, 1000, -4), ["token 2 ", "is 1000", "0 to 999"]),
        ("prompt_token_ids", (2**63,), ["token 0 ", "9223372036854775808"]),
        ("temperature", -0.1, ["-0.1", "0 to 100"]),
        ("temperature", math.nan, ["nan", "0 to 100"]),
        ("temperature", math.inf, ["inf", "0 to 100"]),
        ("temperature", -math.inf, ["-inf", "0 to 100"]),
        ("temperature", 100.1, ["100.1", "0 to 100"]),
        ("temperature", 1e308, ["1e+308", "0 to 100"]),
        ("top_k", -1, ["-1", "0 to 2147483647", "no filter"]),
        ("top_k", 2**31, ["2147483648", "0 to 2147483647"]),
        ("top_p", 0.0, ["0.0", "above 0", "up to 1"]),
        ("top_p", -0.5, ["-0.5"]),
        ("top_p", 1.01, ["1.01"]),
        ("top_p", math.nan, ["nan"]),
        ("top_p", math.inf, ["inf"]),
        ("min_p", -0.01, ["-0.01", "0 to 1"]),
        ("min_p", 1.01, ["1.01", "0 to 1"]),
        ("min_p", math.nan, ["nan", "0 to 1"]),
        ("seed", -1, ["-1", "0 to 18446744073709551615"]),
        ("seed", 2**64, ["18446744073709551616", "0 to 18446744073709551615"]),
        ("repetition_penalty", 0.0, ["0.0", "above 0", "100"]),
        ("repetition_penalty", -1.0, ["-1.0"]),
        ("repetition_penalty", 100.5, ["100.5"]),
        ("repetition_penalty", math.nan, ["nan"]),
        ("presence_penalty", 2.1, ["2.1", "-2.0 to 2.0"]),
        ("presence_penalty", math.nan, ["nan"]),
        ("frequency_penalty", -2.1, ["-2.1", "-2.0 to 2.0"]),
        ("frequency_penalty", math.inf, ["inf"]),
        ("logit_bias", tuple((token, 1.0) for token in range(1000)) * 2, ["2000", "1024"]),
        ("logit_bias", ((1, 1.0), (1000, 1.0)), ["1000", "0 to 999"]),
        ("logit_bias", ((-1, 1.0),), ["-1", "0 to 999"]),
        ("logit_bias", ((5, 100.5),), ["token 5", "100.5", "-100.0 to 100.0"]),
        ("logit_bias", ((5, math.nan),), ["token 5", "nan"]),
        ("allowed_token_ids", frozenset(), ["empty", "1 token"]),
        ("allowed_token_ids", frozenset({3, 1000}), ["1000", "0 to 999"]),
        ("bad_words", ((1,), ()), ["no tokens"]),
        ("bad_words", ((1, 1000),), ["1000", "0 to 999"]),
        ("max_tokens", 0, ["is 0", "at least 1"]),
        ("max_tokens", -7, ["-7", "at least 1"]),
        ("stop_strings", ("x",) * 65, ["65", "64"]),
        ("stop_strings", tuple(map(str, range(10_000))), ["10000", "64"]),
        ("stop_strings", ("a", ""), ["string 1 ", "empty"]),
        ("stop_strings", ("a", "b", "x" * 1025), ["string 2 ", "1025", "1024"]),
        ("stop_strings", ("€" * 342,), ["string 0 ", "1026", "1024"]),
        ("stop_token_ids", frozenset(range(257)), ["257", "256"]),
        ("stop_token_ids", frozenset({1, 1000}), ["1000", "0 to 999"]),
        ("stop_token_ids", frozenset({1, -3}), ["-3", "0 to 999"]),
        ("min_tokens", -1, ["-1", "0 to 2147483647"]),
        ("min_tokens", 2**31, ["2147483648", "0 to 2147483647"]),
        ("tenant", "t" * 129, ["129", "128"]),
        ("tenant", "a\nb", ["U+000A", "index 1"]),
        ("num_choices", 0, ["0", "1 to 64"]),
        ("num_choices", -1, ["-1", "1 to 64"]),
        ("num_choices", 65, ["65", "1 to 64"]),
        ("best_of", -1, ["-1", "1 to 64"]),
        ("best_of", 65, ["65", "1 to 64"]),
        ("width", 0, ["0", "1 to 64"]),
        ("width", 65, ["65", "1 to 64"]),
        ("length_penalty", 10.5, ["10.5", "-10.0 to 10.0"]),
        ("length_penalty", -10.5, ["-10.5", "-10.0 to 10.0"]),
        ("length_penalty", math.nan, ["nan"]),
        ("length_penalty", math.inf, ["inf"]),
        ("logprobs", -1, ["-1", "0 to 100"]),
        ("logprobs", 101, ["101", "0 to 100"]),
        ("prompt_logprobs", -1, ["-1", "0 to 100"]),
        ("prompt_logprobs", 101, ["101", "0 to 100"]),
        ("cache_salt", "s" * 129, ["129", "128"]),
        ("cache_salt", "€" * 43, ["129", "128"]),
        ("priority", -1, ["-1", "0 to 100"]),
        ("priority", 101, ["101", "0 to 100"]),
        ("pin_seconds", -0.5, ["-0.5", "0 to 604800"]),
        ("pin_seconds", 604_800.5, ["604800.5", "0 to 604800", "a week"]),
        ("pin_seconds", math.nan, ["nan"]),
        ("pin_seconds", math.inf, ["inf"]),
        ("queue_priority", -101, ["-101", "-100 to 100"]),
        ("queue_priority", 101, ["101", "-100 to 100"]),
        ("request_id", "", ["empty"]),
        ("request_id", "r" * 129, ["129", "128"]),
        ("request_id", "é" * 65, ["130", "128"]),
        ("request_id", "a\nb", ["U+000A", "index 1"]),
        ("request_id", "ab\x00", ["U+0000", "index 2"]),
        ("request_id", "\x7f", ["U+007F", "index 0"]),
        ("request_id", "abc\x9f", ["U+009F", "index 3"]),
    ],
)
def test_refused_with_the_field_and_the_numbers(field: str, value: object, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(request_with(field, value), LIMITS)
    assert caught.value.field == field
    sentence = str(caught.value)
    assert [word for word in words if word not in sentence] == []
    assert sentence.endswith(".")
    assert len(sentence) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_token_ids", (0, 999)),
        ("prompt_token_ids", (1,) * 64),
        ("temperature", 0.0),
        ("temperature", 100.0),
        ("temperature", 5e-324),
        ("top_k", 0),
        ("top_k", 2**31 - 1),
        ("top_p", 1.0),
        ("top_p", 5e-324),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", None),
        ("seed", 0),
        ("seed", 2**64 - 1),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 100.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("logit_bias", ((0, -100.0), (999, 100.0))),
        ("allowed_token_ids", frozenset({0, 999})),
        ("bad_words", ((0,), (999, 0, 999))),
        ("max_tokens", None),
        ("max_tokens", 1),
        ("max_tokens", 2**31 - 1),
        ("stop_strings", ("x",) * 64),
        ("stop_strings", ("x" * 1024, "é" * 512, "\n")),
        ("stop_token_ids", frozenset(range(256))),
        ("stop_token_ids", frozenset({0, 999})),
        ("min_tokens", 2**31 - 1),
        ("num_choices", 1),
        ("num_choices", 64),
        ("best_of", 0),
        ("best_of", 1),
        ("best_of", 64),
        ("width", 1),
        ("width", 64),
        ("length_penalty", -10.0),
        ("length_penalty", 10.0),
        ("logprobs", None),
        ("logprobs", 0),
        ("logprobs", 100),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 100),
        ("cache_salt", ""),
        ("cache_salt", "s" * 128),
        ("priority", 0),
        ("priority", 100),
        ("pin_seconds", 0.0),
        ("pin_seconds", 604_800.0),
        ("queue_priority", -100),
        ("queue_priority", 100),
        ("request_id", "r" * 128),
        ("request_id", "Anfrage 1: größer/€"),
    ],
)
def test_accepted_up_to_the_edge(field: str, value: object) -> None:
    assert validate(request_with(field, value), LIMITS) is None


def test_a_text_is_refused_by_its_size_only_where_no_tokenizer_could_make_it_fit() -> None:
    """4 x 3 bytes a token x the limit's tokens: one byte more is refused, with both numbers."""
    most = 4 * 3 * LIMITS.max_sequence_tokens
    assert check_text_size("text", "x" * most, 3, LIMITS) is None
    with pytest.raises(InvalidRequest, match=f"{most + 1} bytes.* {LIMITS.max_sequence_tokens} tokens"):
        check_text_size("text", "x" * (most + 1), 3, LIMITS)
    with pytest.raises(InvalidRequest, match=f"{most + 2} bytes"):
        check_text_size("text", "é" * (most // 2 + 1), 3, LIMITS)


def test_no_more_choices_than_may_run_at_once() -> None:
    few = dataclasses.replace(LIMITS, max_choices=8)
    assert validate(request_with("num_choices", 8), few) is None
    with pytest.raises(InvalidRequest, match=r"num_choices is 9.*8"):
        validate(request_with("num_choices", 9), few)


@pytest.mark.parametrize("field", ["best_of", "width"])
def test_no_more_sequences_than_may_run_at_once(field: str) -> None:
    few = dataclasses.replace(LIMITS, max_choices=8)
    assert validate(request_with(field, 8), few) is None
    with pytest.raises(InvalidRequest, match=rf"{field} is 9.*8"):
        validate(request_with(field, 9), few)


def test_no_fewer_are_drawn_than_returned() -> None:
    three = dataclasses.replace(PLAIN, num_choices=3)
    assert validate(dataclasses.replace(three, best_of=3), LIMITS) is None
    with pytest.raises(InvalidRequest, match=r"best_of is 2.* 3 to 64") as caught:
        validate(dataclasses.replace(three, best_of=2), LIMITS)
    assert caught.value.field == "best_of"


class TestBeamSearch:
    SEARCH = dataclasses.replace(GenerateRequest("r", (1,)), beam_search=BeamSearch(4))

    def refused(self, **changes: object) -> InvalidRequest:
        with pytest.raises(InvalidRequest) as caught:
            validate(dataclasses.replace(self.SEARCH, **changes), LIMITS)
        return caught.value

    def test_no_more_answers_than_it_keeps(self) -> None:
        assert validate(dataclasses.replace(self.SEARCH, num_choices=4), LIMITS) is None
        refusal = self.refused(num_choices=5)
        assert (refusal.field, "is 5" in str(refusal), "keeps 4" in str(refusal)) == ("num_choices", True, True)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", 0.5),
            ("top_k", 3),
            ("top_p", 0.9),
            ("min_p", 0.1),
            ("seed", 0),
            ("repetition_penalty", 1.1),
            ("presence_penalty", 0.5),
            ("frequency_penalty", 0.5),
            ("bad_words", ((1, 2),)),
        ],
    )
    def test_nothing_is_drawn(self, field: str, value: object) -> None:
        refusal = self.refused(sampling=SamplingParams(**{field: value}))
        assert (refusal.field, "draws none" in str(refusal)) == (field, True)

    def test_no_best_of(self) -> None:
        assert self.refused(best_of=4).field == "best_of"

    def test_what_says_nothing_of_draws_may_be_said(self) -> None:
        spoken = SamplingParams(temperature=0.0, top_p=1.0, logit_bias=((1, 2.0),), allowed_token_ids=frozenset([1, 2]))
        assert validate(dataclasses.replace(self.SEARCH, sampling=spoken), LIMITS) is None


def test_no_more_tokens_at_least_than_at_most() -> None:
    def request(least: int) -> GenerateRequest:
        return dataclasses.replace(PLAIN, stop=StopConditions(max_tokens=9, min_tokens=least))

    assert validate(request(9), LIMITS) is None
    with pytest.raises(
        InvalidRequest, match=r"min_tokens is 10; use a number from 0 to 9, which is max_tokens\."
    ) as caught:
        validate(request(10), LIMITS)
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["x"] * 257, "257 entries; the most is 256"),
        (["x", ""], "Bad word 1 .* has 0 bytes"),
        (["x" * 1025], "Bad word 0 .* has 1025 bytes"),
        (["€" * 342], "has 1026 bytes"),
    ],
)
def test_bad_words_that_are_too_many_or_of_a_wrong_size(words: list[str], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        check_bad_words(words)
    assert caught.value.field == "bad_words"


def test_bad_words_up_to_the_edge() -> None:
    assert check_bad_words(["x", "€" * 341] * 128) is None


def test_an_invalid_request_is_a_value_error() -> None:
    assert issubclass(InvalidRequest, ValueError)


NUMBERS = st.one_of(st.floats(), st.floats(-1, 2), st.sampled_from([0.0, 1.0, 100.0]))
INTEGERS = st.one_of(st.integers(-3, 130), st.integers(-(2**65), 2**65))
REQUESTS = st.builds(
    GenerateRequest,
    request_id=st.one_of(st.just("r"), st.text(max_size=140)),
    prompt_token_ids=st.lists(st.integers(-1, 1001), max_size=70).map(tuple),
    sampling=st.builds(
        SamplingParams,
        temperature=NUMBERS,
        top_k=INTEGERS,
        top_p=NUMBERS,
        min_p=NUMBERS,
        seed=st.none() | INTEGERS,
        repetition_penalty=NUMBERS,
        presence_penalty=NUMBERS,
        frequency_penalty=NUMBERS,
        logit_bias=st.lists(st.tuples(st.integers(-1, 1001), NUMBERS), max_size=3).map(tuple),
        allowed_token_ids=st.none() | st.frozensets(st.integers(-1, 1001), max_size=5),
        bad_words=st.lists(st.lists(st.integers(-1, 1001), max_size=3).map(tuple), max_size=3).map(tuple),
    ),
    stop=st.builds(
        StopConditions,
        max_tokens=st.none() | INTEGERS,
        stop_strings=st.lists(st.text(max_size=400), max_size=70).map(tuple),
        stop_token_ids=st.frozensets(st.integers(-1, 1001), max_size=300),
        min_tokens=INTEGERS,
    ),
    num_choices=INTEGERS,
    best_of=st.just(0) | INTEGERS,
    beam_search=st.none() | st.builds(BeamSearch, width=INTEGERS, length_penalty=NUMBERS),
    logprobs=st.none() | INTEGERS,
    prompt_logprobs=st.none() | INTEGERS,
    cache_salt=st.text(max_size=140),
    retention=st.builds(Retention, priority=INTEGERS, pin_seconds=NUMBERS),
    queue_priority=INTEGERS,
)
PLAIN = GenerateRequest("r", (1,))


def assert_in_range(request: GenerateRequest) -> None:
    sampling, stop = request.sampling, request.stop
    assert 1 <= len(request.request_id.encode()) <= 128
    assert not any(unicodedata.category(character) == "Cc" for character in request.request_id)
    assert 1 <= len(request.prompt_token_ids) <= 64
    assert set(request.prompt_token_ids) | stop.stop_token_ids <= set(range(1000))
    assert 0 <= sampling.temperature <= 100
    assert 0 <= sampling.top_k < 2**31
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert sampling.seed is None or 0 <= sampling.seed < 2**64
    assert 0 < sampling.repetition_penalty <= 100
    assert -2 <= sampling.presence_penalty <= 2
    assert -2 <= sampling.frequency_penalty <= 2
    assert all(0 <= token < 1000 and -100 <= bias <= 100 for token, bias in sampling.logit_bias)
    assert sampling.allowed_token_ids is None or sampling.allowed_token_ids
    assert (sampling.allowed_token_ids or frozenset()).union(*sampling.bad_words) <= set(range(1000))
    assert all(sampling.bad_words)
    assert stop.max_tokens is None or stop.max_tokens >= 1
    assert 0 <= stop.min_tokens <= (stop.max_tokens or 2**31)
    assert len(stop.stop_strings) <= 64
    assert all(1 <= len(each.encode()) <= 1024 for each in stop.stop_strings)
    assert len(stop.stop_token_ids) <= 256
    assert 1 <= request.num_choices <= request.num_sequences <= 64
    assert request.beam_search is None or (not request.best_of and -10 <= request.beam_search.length_penalty <= 10)
    assert request.logprobs is None or 0 <= request.logprobs <= 100
    assert request.prompt_logprobs is None or 0 <= request.prompt_logprobs <= 100
    assert len(request.cache_salt.encode()) <= 128
    assert 0 <= request.retention.priority <= 100
    assert 0 <= request.retention.pin_seconds <= 604_800
    assert -100 <= request.queue_priority <= 100


def refused_field(request: GenerateRequest) -> str | None:
    try:
        validate(request, LIMITS)
    except InvalidRequest as refusal:
        return refusal.field
    return None


@given(REQUESTS, st.sets(st.sampled_from(sorted(REQUEST | SAMPLING | STOP | RETENTION)), max_size=3))
def test_what_passes_is_in_range_and_what_does_not_names_a_field(request: GenerateRequest, changed: set[str]) -> None:
    # Only some fields take their random values, so that requests with one fault, or none, come up too.
    sampling = {name: getattr(request.sampling, name) for name in SAMPLING & changed}
    stop = {name: getattr(request.stop, name) for name in STOP & changed}
    retention = {name: getattr(request.retention, name) for name in RETENTION & changed}
    whole = {name: getattr(request, name) for name in (REQUEST & changed) - {"sampling", "stop", "retention"}}
    request = dataclasses.replace(
        PLAIN,
        sampling=SamplingParams(**sampling),
        stop=StopConditions(**stop),
        retention=Retention(**retention),
        **whole,
    )
    field = refused_field(request)
    if field is None:
        assert_in_range(request)
    else:
        assert field in changed or (field in BEAM_SEARCH and "beam_search" in changed)


@pytest.mark.parametrize("retention", [Retention(priority=1), Retention(pin_seconds=0.5)])
def test_what_is_not_cached_cannot_be_kept(retention: Retention) -> None:
    request = GenerateRequest("r", (1,), retention=retention, skip_cache_write=True)
    with pytest.raises(InvalidRequest, match="leaves nothing in the cache") as caught:
        validate(request, LIMITS)
    assert caught.value.field == "skip_cache_write"
    validate(dataclasses.replace(request, skip_cache_write=False), LIMITS)
    validate(dataclasses.replace(request, retention=Retention()), LIMITS)
