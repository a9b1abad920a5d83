"""Structured output through the engine: among others, split into choices, preempted, cut, stuck."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from model_runner.attention import AttentionShape, create_backend
from model_runner.constraint import Constraint
from model_runner.engine_types import Failure, FailureKind
from model_runner.executor import TorchExecutor
from model_runner.loading import LoadedModel
from model_runner.request import (
    Chunk,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    StructuredOutput,
    StructureKind,
)
from model_runner.structured_output import Forms
from model_runner.token_text import bytes_of_tokens
from tests.model_runner.engine_harness import Harness
from tests.model_runner.form_cases import FORMS
from tests.model_runner.toy_model import VOCAB_SIZE, ToyTokenizer, answer

EOS = 39
WILD = 50.0
"""A temperature at which any token of the toy model is about as likely as any other."""
PATTERN = "[a-c]{2,4}(d|ef){1,3}g?"


@pytest.fixture(scope="module")
def forms() -> Iterator[Forms]:
    tokens = bytes_of_tokens(ToyTokenizer(), VOCAB_SIZE)
    assert tokens is not None
    made = Forms(tokens, [EOS])
    yield made
    made.close()


def regex(forms: Forms, pattern: str) -> Constraint:
    return forms.compile(StructuredOutput(StructureKind.REGEX, (pattern,)))


def submit(
    harness: Harness,
    name: str,
    constraint: Constraint | None,
    seed: int,
    *,
    max_tokens: int | None = 40,
    ignore_eos: bool = False,
    min_tokens: int = 0,
    num_choices: int = 1,
) -> None:
    sampling = SamplingParams(temperature=WILD, seed=seed)
    stop = StopConditions(max_tokens, ignore_eos=ignore_eos, min_tokens=min_tokens)
    harness.engine.submit(GenerateRequest(name, prompt(seed), sampling, stop, num_choices), constraint)


def prompt(seed: int) -> tuple[int, ...]:
    return tuple((seed * number) % 38 for number in range(1, 8))


def as_text(harness: Harness, name: str, choice: int = 0) -> str:
    text = harness.text(name, choice)
    tokens = [each for each in harness.tokens(name, choice) if each != EOS]
    assert text == ToyTokenizer.text(tokens)
    return text


def test_any_draws_among_free_requests_have_the_form(forms: Forms) -> None:
    with Harness(eos=[EOS], max_sequences=32) as harness:
        for seed in range(50):
            submit(harness, f"bound {seed}", regex(forms, PATTERN), seed)
            submit(harness, f"free {seed}", None, seed, max_tokens=12, ignore_eos=True)
        texts = [as_text(harness, f"bound {seed}") for seed in range(50)]
        assert all(re.fullmatch(PATTERN, text) for text in texts)
        assert {harness.last(f"bound {seed}").finish_reason for seed in range(50)} == {FinishReason.STOP}
        assert len(set(texts)) > 30
        for seed in range(50):
            sampling = SamplingParams(temperature=WILD)
            assert harness.tokens(f"free {seed}") == answer(prompt(seed), 12, sampling, seed)


def test_preemption_changes_nothing(forms: Forms, no_foresight: None) -> None:
    pattern = "([a-c]{2}[d-f]){8,12}"

    def run(harness: Harness) -> list[list[int]]:
        for seed in range(6):
            submit(harness, f"{seed}", regex(forms, pattern), seed, max_tokens=None)
        return [harness.tokens(f"{seed}") for seed in range(6)]

    with Harness(eos=[EOS]) as roomy:
        expected = run(roomy)
    with Harness(eos=[EOS], num_blocks=15) as narrow:
        assert run(narrow) == expected
        assert sum(step.preemptions for step in narrow.recorder.steps) > 0
    assert all(re.fullmatch(pattern, ToyTokenizer.text([t for t in tokens if t != EOS])) for tokens in expected)


def test_each_choice_has_the_form_by_itself(forms: Forms) -> None:
    with Harness(eos=[EOS]) as harness:
        for seed in range(10):
            submit(harness, f"{seed}", regex(forms, PATTERN), seed, num_choices=4)
        texts = [[as_text(harness, f"{seed}", choice) for choice in range(4)] for seed in range(10)]
        assert all(re.fullmatch(PATTERN, text) for family in texts for text in family)
        assert all(len(set(family)) > 1 for family in texts)


def test_the_last_chunk_says_what_ended_it(forms: Forms) -> None:
    with Harness(eos=[EOS]) as harness:
        # Over as soon as nothing may follow: no token ends it.
        submit(harness, "over", regex(forms, "ab"), 1)
        # There is nothing to draw after it, however many tokens are wanted.
        submit(harness, "over too soon", regex(forms, "ab"), 1, min_tokens=10)
        submit(harness, "cut", regex(forms, "[a-e]{30}"), 1, max_tokens=5)
        submit(harness, "complete at the limit", regex(forms, "a{5}"), 1, max_tokens=5)
        last = {name: harness.last(name) for name in ("over", "over too soon", "cut", "complete at the limit")}
        assert {name: chunk.finish_reason for name, chunk in last.items()} == {
            "over": FinishReason.STOP,
            "over too soon": FinishReason.STOP,
            "cut": FinishReason.LENGTH,
            "complete at the limit": FinishReason.STOP,
        }
        assert {(chunk.stop_token_id, chunk.stop_string) for chunk in last.values()} == {(None, None)}
        assert harness.tokens("over too soon") == [0, 1]
        assert (harness.tokens("over"), len(harness.tokens("cut"))) == ([0, 1], 5)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_token_ends_a_complete_form(forms: Forms, ignore_eos: bool) -> None:
    pattern = "(ab)*"
    with Harness(eos=[EOS]) as harness:
        for seed in range(20):
            submit(harness, f"{seed}", regex(forms, pattern), seed, max_tokens=100, ignore_eos=ignore_eos)
        for seed in range(20):
            assert re.fullmatch(pattern, as_text(harness, f"{seed}"))
            last = harness.last(f"{seed}")
            assert (last.finish_reason, last.token_ids) == (FinishReason.STOP, (EOS,))
            assert last.stop_token_id == EOS


def test_a_form_that_gets_stuck_fails_its_request_alone(forms: Forms) -> None:
    """The toy model has no é: who draws a is stuck, who draws b is done."""
    with Harness(eos=[EOS]) as harness:
        for seed in range(20):
            submit(harness, f"{seed}", regex(forms, "aé|b"), seed)
            submit(harness, f"twice {seed}", regex(forms, "aé|b"), seed, num_choices=2)
        ends = [harness.wait(f"{seed}")[-1] for seed in range(20)]
        stuck = [end for end in ends if isinstance(end, Failure)]
        assert {end.text for end in ends if isinstance(end, Chunk)} == {"b"}
        sentence = "The form cannot go on after 1 tokens: no token of this model goes on from there."
        assert {(each.sentence, each.kind) for each in stuck} == {(sentence, FailureKind.FORM)}
        assert 0 < len(stuck) < 20
        for seed in range(20):
            last = harness.wait(f"twice {seed}")[-1]
            assert isinstance(last, Failure) or harness.tokens(f"twice {seed}") == [1]


@pytest.fixture(scope="module")
def real_forms(smollm2: LoadedModel) -> Iterator[Forms]:
    tokens = bytes_of_tokens(smollm2.tokenizer, smollm2.config.vocab_size)
    assert tokens is not None
    made = Forms(tokens, smollm2.config.eos_token_ids)
    yield made
    made.close()


def test_smollm2_writes_what_it_is_told_to(smollm2: LoadedModel, real_forms: Forms) -> None:
    names = ["nested", "enum", "numbers", "any of", "formats", "date", "words", "grammar", "choices"]
    config, cpu = smollm2.config, torch.device("cpu")
    shape = AttentionShape(
        config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, 16, 400, torch.float32, cpu
    )
    executor = TorchExecutor(smollm2.model, create_backend("auto", shape), 16, cpu)
    asked = smollm2.tokenizer.encode("Answer in the form that you know.")
    with Harness(
        num_blocks=400, block_size=16, eos=smollm2.config.eos_token_ids, executor=executor, tokenizer=smollm2.tokenizer
    ) as harness:
        for name in names:
            for seed in range(2):
                sampling = SamplingParams(temperature=1.5 * seed, seed=seed)
                request = GenerateRequest(f"{name} {seed}", tuple(asked), sampling, StopConditions(max_tokens=120))
                harness.engine.submit(request, real_forms.compile(FORMS[name].asked))
        ended = 0
        for name in names:
            for seed in range(2):
                if harness.last(f"{name} {seed}").finish_reason is FinishReason.STOP:
                    ended += 1
                    assert FORMS[name].accepts(harness.text(f"{name} {seed}"))
        assert ended >= len(names)


def test_a_form_beside_other_rules(forms: Forms) -> None:
    """All of them hold; where nothing is left to draw, only a complete form may end."""
    with Harness(eos=[EOS]) as harness:
        for seed in range(10):
            free = SamplingParams(temperature=WILD, seed=seed)
            few = replace(free, allowed_token_ids=frozenset({0, 1, 3, EOS}))
            request = GenerateRequest(f"few {seed}", prompt(seed), few, StopConditions(max_tokens=40))
            harness.engine.submit(request, regex(forms, PATTERN))
            least = StopConditions(max_tokens=40, min_tokens=7)
            harness.engine.submit(GenerateRequest(f"least {seed}", prompt(seed), free, least), regex(forms, "(ab)*"))
            none = replace(free, allowed_token_ids=frozenset({0, 5}))
            harness.engine.submit(GenerateRequest(f"none {seed}", prompt(seed), none), regex(forms, "aab|faf"))
            done = GenerateRequest(f"done {seed}", prompt(seed), none, StopConditions(max_tokens=40))
            harness.engine.submit(done, regex(forms, "a[af]{2}b?"))
        for seed in range(10):
            assert re.fullmatch("[ab]{2,4}d{1,3}", as_text(harness, f"few {seed}"))
            assert re.fullmatch("(ab){4,}", as_text(harness, f"least {seed}"))
            assert re.fullmatch("a[af]{2}", as_text(harness, f"done {seed}"))
            assert harness.last(f"done {seed}").finish_reason is FinishReason.STOP
        ends = [harness.wait(f"none {seed}")[-1] for seed in range(10)]
        sentence = "The form cannot go on after 2 tokens: the request's other rules forbid every token that it allows."
        assert {each.sentence for each in ends if isinstance(each, Failure)} == {sentence}
        assert {each.finish_reason for each in ends if isinstance(each, Chunk)} == {FinishReason.STOP}
