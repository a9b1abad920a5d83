"""What a request's rules say at each token, beside their definitions over the whole text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.logit_edits import LogitEdits, apply_edits, mask_of
from model_runner.logit_rules import LogitRules
from model_runner.request import GenerateRequest, SamplingParams, StopConditions

VOCABULARY = 50
EOS = frozenset({7, VOCABULARY})
"""One of them is beyond the logits, as a model's configuration may have it."""
PROMPT = (3, 3, 9, 12)


def rules_of(
    sampling: SamplingParams | None = None, stop: StopConditions | None = None, prompt: tuple[int, ...] = PROMPT
) -> LogitRules:
    request = GenerateRequest("r", prompt, sampling or SamplingParams(), stop or StopConditions())
    rules = LogitRules.of(request, EOS)
    assert rules is not None
    return rules


def edited(edits: LogitEdits) -> list[float]:
    """Logits -24 to 25, edited."""
    return apply_edits(torch.arange(-24, 26, dtype=torch.float32)[None], [edits])[0].tolist()


def banned(rules: LogitRules, answer: Sequence[int]) -> set[int]:
    return {
        token for token, logit in enumerate(edited(rules.edits([*PROMPT, *answer], VOCABULARY))) if logit == -np.inf
    }


def test_a_plain_request_has_no_rules() -> None:
    sampling = SamplingParams(0.8, top_k=5, top_p=0.9, min_p=0.1, seed=3)
    stop = StopConditions(9, ("x",), frozenset({4}), ignore_eos=True)
    assert LogitRules.of(GenerateRequest("r", PROMPT, sampling, stop), EOS) is None


@pytest.mark.parametrize(
    "change",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": -0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": frozenset({1})},
        {"bad_words": ((1,),)},
    ],
)
def test_each_rule_counts(change: dict[str, object]) -> None:
    plain = torch.arange(-24, 26, dtype=torch.float32).tolist()
    rules = rules_of(dataclasses.replace(SamplingParams(), **change))  # type: ignore[arg-type]
    assert edited(rules.edits([*PROMPT, 1], VOCABULARY)) != plain


@given(
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=20),
    st.sampled_from([0.5, 1.0, 1.5]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.0, -1.0]),
)
def test_penalties_are_those_of_the_whole_text(
    prompt: list[int], answer: list[int], repetition: float, presence: float, frequency: float
) -> None:
    """Repetition counts prompt and answer, the two others the answer; also when the text came token by token."""
    sampling = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=((0, 1.0),)
    )
    rules = rules_of(sampling, prompt=tuple(prompt))
    for length in range(len(answer) + 1):
        edits = rules.edits([*prompt, *answer[:length]], VOCABULARY)
    expected = []
    for token, logit in enumerate(range(-24, 26)):
        value = float(logit)
        if token in prompt or token in answer:
            value = value / repetition if value > 0 else value * repetition
        value -= frequency * answer.count(token) + presence * (token in answer)
        expected.append(value + (token == 0))
    assert edited(edits) == pytest.approx(expected, abs=1e-5)


def test_a_text_that_is_cut_back_counts_anew() -> None:
    rules = rules_of(SamplingParams(frequency_penalty=1.0))
    rules.edits([*PROMPT, 5, 5, 6], VOCABULARY)
    edits = rules.edits([*PROMPT, 5, 8], VOCABULARY)
    assert dict(zip(edits.seen.tolist(), edits.counts.tolist(), strict=True)) == {5: 1, 8: 1}


def test_counts_of_more_tokens_than_there_was_room_for() -> None:
    prompt = tuple(range(1000))
    rules = rules_of(SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0), prompt=prompt)
    edits = rules.edits([*prompt, 700, 5, 2000, 700], 3000)
    counts = dict(zip(edits.seen.tolist(), edits.counts.tolist(), strict=True))
    assert counts == dict.fromkeys(range(1000), 0) | {700: 2, 5: 1, 2000: 1}


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_no_token_may_complete_a_bad_word(words: list[list[int]], answer: list[int]) -> None:
    rules = rules_of(SamplingParams(bad_words=tuple(map(tuple, words))))
    completing = {token for token in range(4) if any([*answer, token][-len(word) :] == word for word in words)}
    assert banned(rules, answer) == completing


def test_a_bad_word_that_begins_in_the_prompt_is_none_of_the_answers() -> None:
    rules = rules_of(SamplingParams(bad_words=((9, 12, 20), (20, 21))))
    assert banned(rules, []) == set()
    assert banned(rules, [20]) == {21}


def test_nothing_ends_the_answer_before_min_tokens() -> None:
    rules = rules_of(stop=StopConditions(stop_token_ids=frozenset({11, 13}), ignore_eos=True, min_tokens=2))
    assert banned(rules, []) == {7, 11, 13}
    assert banned(rules, [1]) == {7, 11, 13}
    assert banned(rules, [1, 1]) == set()


def test_what_is_allowed_and_what_a_form_allows() -> None:
    rules = rules_of(SamplingParams(allowed_token_ids=frozenset({1, 33, 49})))
    everything = set(range(VOCABULARY))
    assert banned(rules, []) == everything - {1, 33, 49}
    form = mask_of([2, 33, 49], VOCABULARY)
    both = edited(rules.edits(PROMPT, VOCABULARY, form))
    assert {token for token, logit in enumerate(both) if logit != -np.inf} == {33, 49}
    alone = edited(rules_of(SamplingParams(bad_words=((2,),))).edits(PROMPT, VOCABULARY, form))
    assert {token for token, logit in enumerate(alone) if logit != -np.inf} == {33, 49}


@given(
    answer=st.lists(st.integers(0, 12), max_size=12),
    draft=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    later=st.lists(st.integers(0, 12), max_size=6),
    prompt_counts=st.booleans(),
)
def test_a_draft_counts_as_if_it_had_been_taken_and_only_while_it_is_looked_at(
    answer: list[int], draft: list[int], later: list[int], prompt_counts: bool
) -> None:
    sampling = SamplingParams(
        repetition_penalty=1.5 if prompt_counts else 1.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bad_words=((1, 2), (3,), (4, 5, 6)),
    )
    stop = StopConditions(min_tokens=8)
    rules = rules_of(sampling, stop)
    for number in range(len(draft) + 1):
        drafted = rules.edits([*PROMPT, *answer], VOCABULARY, draft=draft[:number])
        fresh = rules_of(sampling, stop).edits([*PROMPT, *answer, *draft[:number]], VOCABULARY)
        assert edited(drafted) == edited(fresh)
    after = [*PROMPT, *answer, *later]
    assert edited(rules.edits(after, VOCABULARY)) == edited(rules_of(sampling, stop).edits(after, VOCABULARY))
