"""Beam searches whose answers have a form, compiled by the library, through the real engine on the toy model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from model_runner.engine_types import Failure, FailureKind
from model_runner.request import (
    BeamSearch,
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
from tests.model_runner.toy_model import VOCAB_SIZE, ToyTokenizer, next_logits

EOS = 39
PROMPT = (1, 2)
GREEDY = SamplingParams()
WORDS = ("abba", "abc", "d", "bad", "zebra")


@pytest.fixture(scope="module")
def forms() -> Iterator[Forms]:
    tokens = bytes_of_tokens(ToyTokenizer(), VOCAB_SIZE)
    assert tokens is not None
    made = Forms(tokens, [EOS])
    yield made
    made.close()


def submit(harness: Harness, forms: Forms, words: tuple[str, ...], sampling: SamplingParams = GREEDY) -> None:
    form = StructuredOutput(StructureKind.CHOICES, words)
    request = GenerateRequest(
        "a", PROMPT, sampling, StopConditions(20), num_choices=6, beam_search=BeamSearch(6), structured_output=form
    )
    harness.engine.submit(request, forms.compile(form))


def mean_logprob(word: str) -> float:
    history, total = list(PROMPT), 0.0
    for letter in word:
        token_id = ToyTokenizer.LETTERS.index(letter)
        total += float(torch.log_softmax(next_logits(history).double(), 0)[token_id])
        history.append(token_id)
    return total / len(word)


def test_all_choices_best_first(forms: Forms) -> None:
    """Fewer than there may be beams, so that none is dropped; none begins another, so that each ends by itself."""
    with Harness(eos=[EOS]) as harness:
        submit(harness, forms, WORDS)
        chunks = harness.wait("a")
        assert [chunk.text for chunk in chunks] == sorted(WORDS, key=mean_logprob, reverse=True)
        assert [chunk.score for chunk in chunks] == pytest.approx([mean_logprob(chunk.text) for chunk in chunks])
        assert {chunk.finish_reason for chunk in chunks} == {FinishReason.STOP}


def test_where_no_beam_can_go_on_the_request_fails(forms: Forms) -> None:
    letters = frozenset(ToyTokenizer.LETTERS.index(letter) for letter in "abdz")
    with Harness(eos=[EOS]) as harness:
        submit(harness, forms, ("abc", "zebra"), SamplingParams(allowed_token_ids=letters))
        (failure,) = harness.wait("a")
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.FORM
        harness.forget("a")
        submit(harness, forms, ("abc", "bad"), SamplingParams(allowed_token_ids=letters))
        assert [chunk.text for chunk in harness.wait("a")] == ["bad"]
