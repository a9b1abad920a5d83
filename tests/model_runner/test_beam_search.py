"""Beam searches through the real engine, on the toy model: their answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model_runner.request import (
    BeamSearch,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    StopConditions,
)
from tests.model_runner.beam_support import answers, assert_answers, prompt_of, submit
from tests.model_runner.engine_harness import Harness
from tests.model_runner.naive_beams import naive_search
from tests.model_runner.toy_model import VOCAB_SIZE, ToyTokenizer, answer, next_logits

ENDS = range(10)


class ByThrees:
    """A form whose i-th token is i modulo 3, and which is complete behind one of 30 or more."""

    def __init__(self, length: int = 0, is_over: bool = False) -> None:
        self.length = length
        self.is_over = is_over

    failure = ""
    is_complete = False

    def mask(self) -> NDArray[np.uint32]:
        allowed = np.arange(64) % 3 == self.length % 3
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def advance(self, token_id: int) -> None:
        assert token_id % 3 == self.length % 3
        self.length += 1
        self.is_over = token_id >= 30

    def copy(self) -> ByThrees:
        return ByThrees(self.length, self.is_over)


class TestTheAnswers:
    @pytest.mark.parametrize("early_stopping", EarlyStopping)
    @pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -0.7])
    @pytest.mark.parametrize("width", [1, 2, 4, 6])
    def test_are_those_of_a_naive_search(
        self, width: int, length_penalty: float, early_stopping: EarlyStopping
    ) -> None:
        params = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        with Harness(eos=ENDS, num_blocks=200) as harness:
            for seed in range(4):
                submit(harness, str(seed), prompt_of(5 + seed, seed), width, 12, **params)
            for seed in range(4):
                expected = naive_search(prompt_of(5 + seed, seed), width, 12, eos=ENDS, **params)
                assert_answers(harness, str(seed), expected)

    def test_the_ways_to_stop_differ(self) -> None:
        """Or the test above would prove little."""
        found = {
            tuple(naive_search(prompt_of(5, seed), 4, 12, eos=ENDS, early_stopping=way, length_penalty=penalty))
            for seed in range(4)
            for penalty in (1.0, 2.5)
            for way in EarlyStopping
        }
        assert len(found) > 12

    @pytest.mark.parametrize("block_size", [1, 4, 16])
    @pytest.mark.parametrize("length", [1, 15, 16, 17])
    def test_in_blocks_of_any_size(self, block_size: int, length: int) -> None:
        with Harness(block_size=block_size, num_blocks=600) as harness:
            submit(harness, "a", prompt_of(length), 4, 20)
            assert_answers(harness, "a", naive_search(prompt_of(length), 4, 20))

    def test_a_search_that_keeps_everything_finds_the_best(self) -> None:
        """All answers of two tokens, by their probabilities: 1,600, of which no first token is ever dropped."""
        prompt = prompt_of(6)
        first = torch.log_softmax(next_logits(prompt), 0)
        totals = torch.stack([first[t] + torch.log_softmax(next_logits([*prompt, t]), 0) for t in range(VOCAB_SIZE)])
        best = totals.flatten().sort(descending=True, stable=True)
        with Harness(num_blocks=600) as harness:
            submit(harness, "a", prompt, VOCAB_SIZE, 2)
            found = answers(harness, "a")
        assert [score for score, _ in found] == pytest.approx((best.values[:VOCAB_SIZE] / 2).tolist())
        assert [list(tokens) for _, tokens in found[:5]] == [
            list(divmod(place, VOCAB_SIZE)) for place in best.indices[:5].tolist()
        ]

    def test_a_width_of_one_is_greedy(self) -> None:
        with Harness() as harness:
            submit(harness, "a", [1, 2, 3], 1, 15)
            assert list(answers(harness, "a")[0][1]) == answer([1, 2, 3], 15)

    def test_fewer_are_returned_than_kept(self) -> None:
        with Harness(eos=ENDS) as harness:
            submit(harness, "a", [1, 2, 3], 6, 10, num_choices=2)
            assert_answers(harness, "a", naive_search([1, 2, 3], 6, 10, eos=ENDS)[:2])

    def test_why_they_end(self) -> None:
        with Harness(eos=ENDS) as harness:
            submit(harness, "a", prompt_of(5, 1), 6, 6)
            seen = set()
            for chunk in harness.wait("a"):
                by_token = chunk.token_ids[-1] in ENDS
                seen.add(by_token)
                assert chunk.finish_reason is (FinishReason.STOP if by_token else FinishReason.LENGTH)
                assert chunk.stop_token_id == (chunk.token_ids[-1] if by_token else None)
                assert chunk.text == ToyTokenizer.text(chunk.token_ids[: -1 if by_token else None])
            assert seen == {True, False}

    def test_stop_tokens_end_like_end_tokens_and_end_tokens_can_be_ignored(self) -> None:
        with Harness(eos=[7, 8]) as harness:
            submit(harness, "a", [1, 2], 4, 10, stop_token_ids=[1, 2, 3], ignore_eos=True)
            submit(harness, "b", [1, 2], 4, 10, stop_token_ids=[1, 2])
            assert_answers(harness, "a", naive_search([1, 2], 4, 10, eos=[1, 2, 3]))
            assert_answers(harness, "b", naive_search([1, 2], 4, 10, eos=[1, 2, 7, 8]))

    def test_no_end_token_before_the_least_length(self) -> None:
        expected = naive_search([1, 2], 4, 12, eos=range(8), min_new_tokens=6)
        assert min(len(tokens) for _, tokens in expected) == 7
        with Harness(eos=range(8)) as harness:
            submit(harness, "a", [1, 2], 4, 12, min_tokens=6)
            assert_answers(harness, "a", expected)

    def test_stop_strings(self) -> None:
        stops = ("B", "de", "q")
        letters = [ToyTokenizer.text([token]) for token in range(VOCAB_SIZE)]

        def stopped(tokens: tuple[int, ...]) -> bool:
            return ToyTokenizer.text(tokens).endswith(stops)

        expected = naive_search([1, 2], 4, 12, stops=stopped)
        assert any(stopped(tokens) for _, tokens in expected)
        with Harness() as harness:
            submit(harness, "a", [1, 2], 4, 12, stop_strings=stops)
            assert_answers(harness, "a", expected)
            for chunk in harness.wait("a"):
                text = "".join(letters[token] for token in chunk.token_ids)
                found = next((stop for stop in stops if text.endswith(stop)), None)
                assert (chunk.text, chunk.stop_string) == (text.removesuffix(found or ""), found)
                assert chunk.finish_reason is (FinishReason.STOP if found else FinishReason.LENGTH)

    def test_no_stop_string_is_looked_for_before_the_least_length(self) -> None:
        stops = ("B", "d", "q", "k", "z", "m")

        def stopped(tokens: tuple[int, ...]) -> bool:
            return len(tokens) > 4 and ToyTokenizer.text(tokens).endswith(stops)

        expected = naive_search([1, 2], 4, 12, stops=stopped)
        assert any(set(ToyTokenizer.text(tokens[:4])) & set(stops) for _, tokens in expected)
        assert any(stopped(tokens) for _, tokens in expected)
        with Harness() as harness:
            submit(harness, "a", [1, 2], 4, 12, stop_strings=stops, min_tokens=4)
            assert_answers(harness, "a", expected)
            for chunk in harness.wait("a"):
                text = ToyTokenizer.text(chunk.token_ids)
                assert chunk.text == (text[:-1] if stopped(chunk.token_ids) else text)

    def test_log_probabilities(self) -> None:
        with Harness(eos=ENDS) as harness:
            submit(harness, "a", [1, 2], 4, 8, logprobs=3, length_penalty=0.0)
            for chunk in harness.wait("a"):
                history = [1, 2]
                for position, token_id in zip(chunk.logprobs, chunk.token_ids, strict=True):
                    expected = torch.log_softmax(next_logits(history).double(), 0)
                    assert (position.token_id, position.logprob) == (token_id, pytest.approx(float(expected[token_id])))
                    assert [value for _, value in position.top] == pytest.approx(expected.topk(3).values.tolist())
                    history.append(token_id)
                assert chunk.score == pytest.approx(sum(position.logprob for position in chunk.logprobs), abs=1e-5)

    def test_log_probabilities_come_only_if_asked_for(self) -> None:
        with Harness() as harness:
            submit(harness, "a", [1], 2, 3)
            assert [chunk.logprobs for chunk in harness.wait("a")] == [(), ()]

    def test_biases_and_allowed_tokens(self) -> None:
        allowed = frozenset(range(0, VOCAB_SIZE, 3))
        bias = torch.full((VOCAB_SIZE,), -torch.inf)
        bias[list(allowed)] = 0.0
        bias[3] += 1.5
        sampling = SamplingParams(logit_bias=((3, 1.5), (4, 9.0)), allowed_token_ids=allowed)
        with Harness(eos=[9]) as harness:
            submit(harness, "a", [1, 2], 4, 8, sampling=sampling)
            assert_answers(harness, "a", naive_search([1, 2], 4, 8, eos=[9], bias=lambda answer: bias))

    def test_each_beam_keeps_its_form(self) -> None:
        """Tokens that are 0, 1, 2, 0, ... modulo 3: a state that each beam has for itself."""

        def bias(answer: tuple[int, ...]) -> torch.Tensor:
            allowed = torch.arange(VOCAB_SIZE) % 3 == len(answer) % 3
            return torch.where(allowed, 0.0, -torch.inf)

        harness = Harness(eos=[9])
        request = GenerateRequest(
            "a", (1, 2), stop=StopConditions(max_tokens=8), num_choices=4, beam_search=BeamSearch(4)
        )
        harness.engine.submit(request).sequences[0].constraint = ByThrees()
        with harness:
            expected = naive_search([1, 2], 4, 8, eos=[9], bias=bias, stops=lambda answer: answer[-1] >= 30)
            assert_answers(harness, "a", expected)
            ended = [tokens[-1] >= 30 or tokens[-1] == 9 for _, tokens in expected]
            assert True in ended
            reasons = [chunk.finish_reason for chunk in harness.wait("a")]
            assert reasons == [FinishReason.STOP if each else FinishReason.LENGTH for each in ended]

    def test_fewer_answers_than_beams(self) -> None:
        """Of two tokens there are four answers of two."""
        sampling = SamplingParams(allowed_token_ids=frozenset([5, 6]))
        with Harness() as harness:
            submit(harness, "a", [1], 6, 2, sampling=sampling)
            found = answers(harness, "a")
            assert {tokens for _, tokens in found} == {(5, 5), (5, 6), (6, 5), (6, 6)}

    def test_where_nothing_may_follow_there_is_an_empty_answer(self) -> None:
        with Harness(eos=range(VOCAB_SIZE)) as harness:
            submit(harness, "a", [1], 2, 5, min_tokens=2)
            (chunk,) = harness.wait("a")
            assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ((), "", FinishReason.LENGTH)

    def test_tokens_of_beams_that_were_dropped_count(self) -> None:
        with Harness() as harness:
            submit(harness, "a", prompt_of(9), 4, 6)
            usage = harness.last("a").usage
            # Nothing ends before the limit: four beams in each of six steps.
            assert (usage.prompt_tokens, usage.output_tokens) == (9, 24)
            assert sum(step.generated_tokens for step in harness.recorder.steps) == 24
            assert harness.recorder.first_tokens == 1
