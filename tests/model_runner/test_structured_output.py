"""Structured output: whatever is drawn, a text that ended by itself has the form; a bad form is refused with why."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray

from model_runner.detokenizer import Detokenizer
from model_runner.invalid import InvalidRequest
from model_runner.loading import LoadedModel
from model_runner.request import StructuredOutput, StructureKind
from model_runner.structured_output import MAX_CACHED_FORMS, FormConstraint, Forms
from model_runner.token_text import bytes_of_tokens
from tests.model_runner.form_cases import FORMS, SCHEMAS
from tests.model_runner.test_detokenizer import GEMMA, LLAMA, Wrapped
from tests.model_runner.toy_model import ToyTokenizer

EOS = 2
SEEDS = 50
MAX_TOKENS = 150


@pytest.fixture(scope="module")
def forms(smollm2: LoadedModel) -> Iterator[Forms]:
    tokens = bytes_of_tokens(smollm2.tokenizer, smollm2.config.vocab_size)
    assert tokens is not None
    made = Forms(tokens, [EOS])
    yield made
    made.close()


def allowed_ids(constraint: FormConstraint) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(constraint.mask().view(np.uint8), bitorder="little"))


def allowed(constraint: FormConstraint) -> list[int]:
    return allowed_ids(constraint).tolist()


def walk(constraint: FormConstraint, eos: set[int], chance: np.random.Generator) -> list[int] | None:
    """Any tokens that the masks allow, each as likely as any other, as far as a STOP; None where there is none."""
    token_ids: list[int] = []
    for _ in range(MAX_TOKENS):
        ids = allowed_ids(constraint)
        token_ids.append(int(ids[chance.integers(ids.size)]))
        constraint.advance(token_ids[-1])
        assert constraint.failure == ""
        if constraint.is_over or token_ids[-1] in eos:
            return token_ids
    return None


@pytest.mark.parametrize("name", FORMS)
def test_whatever_the_masks_allow_has_the_form(smollm2: LoadedModel, forms: Forms, name: str) -> None:
    form = FORMS[name]
    ended = 0
    for seed in range(SEEDS):
        token_ids = walk(forms.compile(form.asked), {EOS}, np.random.default_rng(seed))
        if token_ids is None:
            continue
        ended += 1
        # The end token is no part of the text.
        text = smollm2.tokenizer.decode([each for each in token_ids if each != EOS])
        assert form.accepts(text), text
    assert ended >= form.likely_ends


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_form_takes_every_text_that_has_it(smollm2: LoadedModel, forms: Forms, name: str) -> None:
    """A constraint that forbids too much would pass the test above."""
    for value in SCHEMAS[name].valid:
        jsonschema.validate(value, SCHEMAS[name].schema)
        constraint = forms.compile(FORMS[name].asked)
        for token_id in smollm2.tokenizer.encode(json.dumps(value, ensure_ascii=False)):
            assert token_id in allowed(constraint)
            constraint.advance(token_id)
        assert constraint.is_over or EOS in allowed(constraint)


@pytest.mark.parametrize(
    ("text", "begins"), [('{"a": [1, {"b": null}]}', True), ("{}", True), ("[1]", False), ("3", False)]
)
def test_json_object_is_any_object_and_nothing_else(
    smollm2: LoadedModel, forms: Forms, text: str, begins: bool
) -> None:
    constraint = forms.compile(StructuredOutput(StructureKind.JSON_OBJECT))
    token_ids = smollm2.tokenizer.encode(text)
    assert (token_ids[0] in allowed(constraint)) == begins
    if begins:
        for token_id in token_ids:
            constraint.advance(token_id)
        assert (constraint.is_over, constraint.failure) == (True, "")


def test_the_end_is_allowed_exactly_when_the_form_is_complete(smollm2: LoadedModel, forms: Forms) -> None:
    constraint = forms.compile(StructuredOutput(StructureKind.REGEX, ("(12){2,4}3?",)))
    seen = []
    for token_id in smollm2.tokenizer.encode("121212"):
        seen.append((EOS in allowed(constraint), constraint.is_over))
        constraint.advance(token_id)
    seen.append((EOS in allowed(constraint), constraint.is_over))
    # Digits are tokens each: complete after 4 and 6 of them, where more may follow.
    assert [complete for complete, _ in seen] == [False, False, False, False, True, False, True]
    assert not any(over for _, over in seen)
    constraint.advance(smollm2.tokenizer.encode("3")[0])
    assert (allowed(constraint), constraint.is_over) == ([EOS], True)


def test_a_copy_goes_its_own_way(smollm2: LoadedModel, forms: Forms) -> None:
    digits = {text: smollm2.tokenizer.encode(text)[0] for text in "12345"}
    first = forms.compile(StructuredOutput(StructureKind.CHOICES, ("123", "145")))
    first.advance(digits["1"])
    second = first.copy()
    assert allowed(second) == allowed(first) == sorted([digits["2"], digits["4"]])
    first.advance(digits["2"])
    assert (allowed(first), allowed(second)) == ([digits["3"]], sorted([digits["2"], digits["4"]]))
    second.advance(digits["4"])
    assert (allowed(first), allowed(second)) == ([digits["3"]], [digits["5"]])


def test_every_way_to_write_a_forced_text_is_allowed(smollm2: LoadedModel, forms: Forms) -> None:
    """Not only the tokens that the tokenizer would choose: the model's own probabilities decide."""
    tokenizer = smollm2.tokenizer
    constraint = forms.compile(StructuredOutput(StructureKind.CHOICES, ("hello",)))
    assert {tokenizer.decode([token_id]) for token_id in allowed(constraint)} == {"h", "he", "hel", "hell", "hello"}


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (StructureKind.JSON_SCHEMA, "{", r"property name .* at character 1"),
        (StructureKind.JSON_SCHEMA, "", "expecting value at character 0"),
        (StructureKind.JSON_SCHEMA, "3", "a schema is a JSON object"),
        (StructureKind.JSON_SCHEMA, '{"maximum": NaN}', "NaN is no JSON"),
        (StructureKind.JSON_SCHEMA, '{"maximum": 1' + "0" * 5000 + "}", "thousands of digits"),
        (StructureKind.JSON_SCHEMA, '{"items":' * 30_000, "nested too deep|at character"),
        (StructureKind.JSON_SCHEMA, '{"items":' * 500 + "{}" + "}" * 500, "recursion|nested"),
        (StructureKind.JSON_SCHEMA, '{"type": "banana"}', "banana"),
        (StructureKind.JSON_SCHEMA, '{"not": {"type": "string"}}', "not"),
        (StructureKind.JSON_SCHEMA, '{"not": {}, "x-guidance": {"lenient": true}}', "not"),
        (StructureKind.JSON_SCHEMA, '{"$ref": "#/$defs/missing"}', "missing"),
        (StructureKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1/schema.json"}', "does not fetch"),
        (StructureKind.JSON_SCHEMA, '{"$ref": "#"}', "no token"),
        (StructureKind.JSON_SCHEMA, '{"type": "integer", "minimum": 2, "maximum": 1}', r"minimum \(2\)"),
        (StructureKind.JSON_SCHEMA, '{"type": "string", "pattern": "("}', "unclosed group"),
        (StructureKind.JSON_SCHEMA, "false", "false"),
        (StructureKind.REGEX, "(", "unclosed group"),
        (StructureKind.REGEX, "a(?=b)", "look-around"),
        (StructureKind.REGEX, "", "only the empty text"),
        (StructureKind.REGEX, "(" * 60_000, "nest|unclosed|limit"),
        (StructureKind.GRAMMAR, "", "Empty|no start"),
        (StructureKind.GRAMMAR, 'begin: "a"', "no start rule"),
        (StructureKind.GRAMMAR, "start: missing", 'unknown name: "missing"'),
        (StructureKind.GRAMMAR, "start: <|im_start|>", "unknown special token"),
        (StructureKind.GRAMMAR, "start: (", r"1\(\d+\)"),
        (StructureKind.GRAMMAR, '{"grammars": []}', "trailing characters"),
    ],
)
def test_a_bad_form_is_refused_with_the_reason(forms: Forms, kind: StructureKind, text: str, why: str) -> None:
    form = StructuredOutput(kind, (text,))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"^The [A-Za-z ]+ cannot be used: .*({why}).*\\.$") as caught:
            forms.known(form) or forms.compile(form)
        assert caught.value.field == f"structured_output.{kind.value}"
        assert len(str(caught.value)) < 400


def test_a_grammar_that_would_be_compiled_for_hours_is_given_up(smollm2: LoadedModel, forms: Forms) -> None:
    # Texts whose length is a multiple of six primes: a machine with their product of states.
    parts = " & ".join(f"/(.{{{prime}}})*/" for prime in (7, 11, 13, 17, 19, 23))
    with pytest.raises(InvalidRequest, match="more than 2 seconds to compile"):
        forms.compile(StructuredOutput(StructureKind.GRAMMAR, (f"start: A\nA: {parts}",)))
    # And the next one is compiled as ever.
    assert forms.compile(StructuredOutput(StructureKind.REGEX, ("[ab]{7}",))).failure == ""


def test_the_process_that_tries_forms_is_started_again(toy_forms: Forms) -> None:
    def compile_repeated(count: int) -> None:
        assert toy_forms.compile(StructuredOutput(StructureKind.REGEX, (f"b{{{count}}}",))).failure == ""

    compile_repeated(1)
    process = toy_forms._trial._process
    assert process is not None
    process.kill()
    process.wait()
    compile_repeated(2)
    toy_forms.close()
    compile_repeated(3)


def test_known_forms_are_the_latest(forms: Forms) -> None:
    asked = [StructuredOutput(StructureKind.REGEX, (f"a{{{count}}}",)) for count in range(1, MAX_CACHED_FORMS + 2)]
    for each in asked:
        assert forms.known(each) is None
        forms.compile(each)
        assert forms.known(asked[0]) is not None or each is asked[-1]
    assert [forms.known(each) is None for each in (asked[0], asked[1], asked[2], asked[-1])] == [
        False,
        True,
        False,
        False,
    ]


TOY_EOS = 39


@pytest.fixture(scope="module")
def toy_forms() -> Iterator[Forms]:
    tokens = bytes_of_tokens(ToyTokenizer(), 40)
    assert tokens is not None
    made = Forms(tokens, [TOY_EOS])
    yield made
    made.close()


def test_a_model_that_has_no_token_for_a_form(toy_forms: Forms) -> None:
    with pytest.raises(InvalidRequest, match=r"no token of this model goes on from there\.$"):
        toy_forms.compile(StructuredOutput(StructureKind.REGEX, ("é",)))
    constraint = toy_forms.compile(StructuredOutput(StructureKind.REGEX, ("aé|b",)))
    assert allowed(constraint) == [0, 1]
    constraint.advance(0)
    assert (allowed(constraint), constraint.failure) == ([], "no token of this model goes on from there")
    assert not constraint.is_over


def test_an_end_token_within_a_form_is_no_end(toy_forms: Forms) -> None:
    constraint = toy_forms.compile(StructuredOutput(StructureKind.GRAMMAR, ('start: "a" (<end> | "b") "c"',)))
    constraint.advance(0)
    assert allowed(constraint) == [1]


def test_where_only_an_impossible_text_could_follow_the_form_is_over(toy_forms: Forms) -> None:
    constraint = toy_forms.compile(StructuredOutput(StructureKind.REGEX, ("aé?",)))
    constraint.advance(0)
    assert (allowed(constraint), constraint.is_over, constraint.failure) == ([TOY_EOS], True, "")


@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA])
def test_sentencepiece_tokens_count_every_space(tokenizer: Wrapped) -> None:
    """The first token may begin with a space, which decode() would drop and the form asks for."""
    tokens = bytes_of_tokens(tokenizer, 320)
    assert tokens is not None
    end = tokenizer.backend.token_to_id("<|end|>")
    forms = Forms(tokens, [end])
    for pattern in (" the dog", "the dog", "[ ]{0,3}[a-z]{1,4}é?€[ü-ý狐😀]"):
        for seed in range(20):
            constraint = forms.compile(StructuredOutput(StructureKind.REGEX, (pattern,)))
            token_ids = walk(constraint, {end}, np.random.default_rng(seed))
            assert token_ids is not None
            detokenizer = Detokenizer(tokenizer, strip=False)
            text = detokenizer.push([each for each in token_ids if each != end]).text + detokenizer.finish()
            assert re.fullmatch(pattern, text), (text, token_ids)
    forms.close()


def test_tokens_as_bytes(smollm2: LoadedModel) -> None:
    tokens = bytes_of_tokens(smollm2.tokenizer, 49152)
    assert tokens is not None
    text = "naïve 日本語 🎉 <|im_end|>\n\tx"
    assert b"".join(tokens[each] for each in smollm2.tokenizer.encode(text)) == text.replace("<|im_end|>", "").encode()
    assert tokens[1] == b""
