"""Penalties, biases, bans and minimum lengths through the engine, beside answers computed without one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from model_runner.admission import SearchRoom
from model_runner.constraint import Constraint
from model_runner.generation import Generation
from model_runner.logit_edits import mask_of
from model_runner.observer import SilentObserver
from model_runner.request import FinishReason, GenerateRequest, SamplingParams, StopConditions
from model_runner.sampling import sample
from model_runner.sampling_rows import SamplingRows
from model_runner.sequence import LiveRequest
from tests.model_runner.engine_harness import Harness
from tests.model_runner.toy_model import VOCAB_SIZE, ToyTokenizer, answer, next_logits

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_p=0.9,
    seed=5,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    logit_bias=((3, 2.5), (17, -4.0)),
    allowed_token_ids=frozenset(range(2, 38)),
    bad_words=((4,), (3, 3), (20, 21, 22)),
)
GREEDY = SamplingParams(repetition_penalty=1.8, frequency_penalty=0.5)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def ruled_logits(prompt: Sequence[int], output: Sequence[int], sampling: SamplingParams) -> torch.Tensor:
    """The toy model's next logits, edited one token after the other."""
    biases = dict(sampling.logit_bias)
    logits = next_logits([*prompt, *output])
    for token in range(VOCAB_SIZE):
        value = logits[token].item()
        if token in prompt or token in output:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        value -= sampling.frequency_penalty * output.count(token) + sampling.presence_penalty * (token in output)
        value += biases.get(token, 0.0)
        words = [list(word) for word in sampling.bad_words]
        is_bad = any([*output, token][-len(word) :] == word for word in words)
        is_allowed = sampling.allowed_token_ids is None or token in sampling.allowed_token_ids
        logits[token] = value if is_allowed and not is_bad else -math.inf
    return logits


def ruled_answer(prompt: Sequence[int], count: int, sampling: SamplingParams, seed: int = 0) -> list[int]:
    output: list[int] = []
    for _ in range(count):
        rows = SamplingRows.of([sampling], [seed], [len(prompt) + len(output)])
        output.append(int(sample(ruled_logits(prompt, output, sampling)[None], rows)))
    return output


class TestRules:
    @pytest.mark.parametrize("sampling", [EVERYTHING, GREEDY], ids=["drawn", "greedy"])
    def test_alone(self, sampling: SamplingParams) -> None:
        prompt = prompt_of(9)
        expected = ruled_answer(prompt, 20, sampling, seed=5)
        assert expected != answer(prompt, 20, sampling, seed=5)
        with Harness() as harness:
            harness.submit("a", prompt, 20, sampling=sampling)
            assert harness.tokens("a") == expected

    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("chunk", [0, 7])
    def test_among_others_in_a_pool_so_small_that_some_are_preempted(self, chunk: int) -> None:
        prompts = {f"r{number}": prompt_of(6 + number, number) for number in range(16)}
        plain = SamplingParams(temperature=0.8, seed=5)
        ways = {name: (EVERYTHING, GREEDY, plain, SamplingParams())[number % 4] for number, name in enumerate(prompts)}
        with Harness(num_blocks=14, prefill_chunk_tokens=chunk) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 18, sampling=ways[name])
            for name, prompt in prompts.items():
                assert harness.tokens(name) == ruled_answer(prompt, 18, ways[name], seed=5), name
            assert sum(step.preemptions for step in harness.recorder.steps) > 0

    def test_each_choice_counts_its_own_tokens(self) -> None:
        prompt = prompt_of(11)
        with Harness() as harness:
            harness.submit("a", prompt, 15, sampling=EVERYTHING, num_choices=3)
            for choice in range(3):
                assert harness.tokens("a", choice) == ruled_answer(prompt, 15, EVERYTHING, seed=5 + choice)

    def test_logprobs_are_the_models_own(self) -> None:
        prompt = prompt_of(5)
        with Harness() as harness:
            harness.submit("a", prompt, 6, sampling=EVERYTHING, logprobs=2)
            history = list(prompt)
            for chunk in harness.wait("a"):
                expected = next_logits(history).double().log_softmax(0)
                [token], [position] = chunk.token_ids, chunk.logprobs
                assert position.token_id == token
                assert position.logprob == pytest.approx(expected[token].item(), abs=1e-6)
                assert [value for _, value in position.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-6)
                history.append(token)


class TestMinTokens:
    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_no_end_is_drawn_before(self, ignore_eos: bool) -> None:
        prompt = prompt_of(4)
        ends = frozenset(range(0, VOCAB_SIZE, 2))
        others = SamplingParams(allowed_token_ids=frozenset(range(VOCAB_SIZE)) - ends)
        with Harness(eos=sorted(ends)[:10]) as harness:
            options = {"stop_token_ids": sorted(ends)[10:], "ignore_eos": ignore_eos, "min_tokens": 7}
            harness.submit("a", prompt, 7, **options)
            assert harness.tokens("a") == ruled_answer(prompt, 7, others)
            assert harness.last("a").finish_reason is FinishReason.LENGTH
            harness.submit("b", prompt, 50, **options)
            assert harness.tokens("b")[:7] == ruled_answer(prompt, 7, others)
            last = harness.last("b")
            assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, harness.tokens("b")[-1])
            assert not ends & set(harness.tokens("b")[:-1]) - set(sorted(ends)[:10] if ignore_eos else [])

    def test_no_stop_string_is_looked_for_before(self) -> None:
        expected = answer([1], 20)
        letters = ToyTokenizer.text(expected)
        # One that the first tokens have, one across the border, and one behind it.
        stops = (letters[2:4], letters[5:7], letters[9:11])
        assert [letters.index(stop) for stop in stops] == [2, 5, 9]
        with Harness() as harness:
            harness.submit("a", [1], 20, stop_strings=stops, min_tokens=6)
            assert harness.text("a") == letters[:9]
            assert harness.last("a").stop_string == stops[2]
            harness.submit("b", [1], 6, stop_strings=stops, min_tokens=6)
            assert harness.text("b") == letters[:6]
            assert harness.last("b").finish_reason is FinishReason.LENGTH


class TestNoTokenLeft:
    @pytest.mark.parametrize("num_choices", [1, 3])
    def test_the_choice_stops_without_a_cause(self, num_choices: int) -> None:
        first = answer([1], 1)[0]
        # One token may come, and not twice.
        sampling = SamplingParams(allowed_token_ids=frozenset({first}), bad_words=((first, first),))
        with Harness() as harness:
            harness.submit("a", [1], 9, sampling=sampling, num_choices=num_choices, logprobs=1)
            for choice in range(num_choices):
                one, end = [chunk for chunk in harness.wait("a") if chunk.choice_index == choice]
                assert (one.token_ids, one.finish_reason) == ((first,), None)
                assert (end.token_ids, end.logprobs, end.text) == ((), (), "")
                assert (end.finish_reason, end.stop_token_id, end.stop_string) == (FinishReason.STOP, None, None)
            assert harness.last("a").usage.output_tokens == num_choices

    def test_not_even_a_first_one(self) -> None:
        sampling = SamplingParams(allowed_token_ids=frozenset({5}), bad_words=((5,),))
        with Harness() as harness:
            harness.submit("a", [1, 2, 3], 9, sampling=sampling, prompt_logprobs=0)
            [end] = harness.wait("a")
            assert (end.token_ids, end.finish_reason) == ((), FinishReason.STOP)
            assert [position.token_id for position in end.prompt_logprobs] == [2, 3]
            assert (end.usage.prompt_tokens, end.usage.output_tokens) == (3, 0)


@dataclass
class Only:
    """A form that allows some tokens."""

    token_ids: Sequence[int]

    def mask(self) -> np.ndarray:
        return mask_of(self.token_ids, VOCAB_SIZE)

    def advance(self, token_id: int) -> None:
        assert token_id in self.token_ids

    @property
    def is_over(self) -> bool:
        return False

    def copy(self) -> Constraint:
        return Only(self.token_ids)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(bad_words=((11,),))], ids=["plain", "with rules"]
)
def test_a_choice_keeps_to_its_form(sampling: SamplingParams) -> None:
    generation = Generation(ToyTokenizer(), frozenset(), 100, SilentObserver(), SearchRoom(100, 16))
    request = GenerateRequest("a", (1, 2), sampling, StopConditions(max_tokens=1))
    plain, formed = (LiveRequest(request, arrived_at=0.0) for _ in range(2))
    for live in (plain, formed):
        live.sequences.append(generation.first_sequence(live))
    formed.sequences[0].constraint = Only([11, 30])
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 11] = 1.0
    ready = [plain.sequences[0], formed.sequences[0]]
    outcome = generation.advance(ready, [0, 1], logits, now=1.0)
    expected = [(11,), (11,)] if not sampling.bad_words else [(0,), (30,)]
    assert [chunk.token_ids for chunk in outcome.chunks] == expected
