"""Several answers to one prompt: it is computed once, and of more answers than asked for the likeliest come."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kvmanager import KvManager
from model_runner.best_of import BestOf
from model_runner.engine_types import Failure
from model_runner.request import BeamSearch, Chunk, FinishReason, SamplingParams, Usage
from tests.model_runner.engine_harness import Harness
from tests.model_runner.test_engine import UnreliableBooks
from tests.model_runner.toy_model import VOCAB_SIZE, ToyTokenizer, answer, next_logits

DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


class TestParallelSampling:
    """A prompt of 1,000 tokens, and 8 answers of 5."""

    PROMPT = prompt_of(1_000)

    def assert_answers(self, harness: Harness, name: str, count: int = 8) -> None:
        for choice in range(count):
            assert harness.tokens(name, choice) == answer(self.PROMPT, 5, DRAWN, seed=11 + choice)

    def assert_computed_once(self, harness: Harness) -> None:
        # The fifth token of each is drawn, and not computed.
        assert harness.executor.computed_tokens == 1_000 + 8 * 4
        assert sum(step.prefill_tokens for step in harness.recorder.steps) == 1_000
        assert harness.pool.totals.queried_tokens == 1_000
        assert harness.pool.totals.forks == 7
        # 63 blocks for the prompt; its last one, which is half full, is copied for all but one.
        assert (harness.pool.totals.allocated_blocks, harness.pool.totals.copies) == (63 + 7, 7)

    @pytest.mark.parametrize("chunk", [0, 300])
    def test_the_prompt_is_computed_once(self, chunk: int) -> None:
        with Harness(
            num_blocks=200, block_size=16, max_batched_tokens=2_000 if not chunk else 512, prefill_chunk_tokens=chunk
        ) as harness:
            harness.submit("a", self.PROMPT, 5, sampling=DRAWN, num_choices=8)
            self.assert_answers(harness, "a")
            self.assert_computed_once(harness)
            assert len(harness.executor.steps) == (1 if not chunk else 4) + 4

    @pytest.mark.usefixtures("no_foresight")
    def test_choices_that_are_preempted_find_the_prompt_cached(self) -> None:
        """Room for the prompt and 6 blocks: who is preempted computes what is behind the prompt once more, at most."""
        with Harness(num_blocks=70, block_size=16) as harness:
            harness.submit("a", self.PROMPT, 30, sampling=DRAWN, num_choices=8)
            for choice in range(8):
                assert harness.tokens("a", choice) == answer(self.PROMPT, 30, DRAWN, seed=11 + choice)
            preemptions = sum(step.preemptions for step in harness.recorder.steps)
            assert preemptions > 0
            again = harness.executor.computed_tokens - 1_000 - 8 * 29
            assert 0 < again <= preemptions * (1_000 % 16 + 29)


def expected(prompt: Sequence[int], draws: int, count: int, length: int, ends: Sequence[int] = ()) -> list[tuple]:
    """Means of log-probabilities, and the tokens, of the `count` likeliest of `draws` answers."""
    found = []
    for draw in range(draws):
        tokens = answer(prompt, length, DRAWN, seed=11 + draw)
        stop = next((index + 1 for index, token in enumerate(tokens) if token in ends), length)
        history, total = list(prompt), 0.0
        for token in tokens[:stop]:
            total += float(torch.log_softmax(next_logits(history).double(), 0)[token])
            history.append(token)
        found.append((total / stop, tuple(tokens[:stop])))
    return sorted(found, key=lambda each: -each[0])[:count]


def assert_best(harness: Harness, name: str, best: list[tuple]) -> None:
    chunks = harness.wait(name)
    assert not any(isinstance(chunk, Failure) for chunk in chunks), chunks
    assert [chunk.choice_index for chunk in chunks] == list(range(len(best)))
    assert [chunk.token_ids for chunk in chunks] == [tokens for _, tokens in best]
    assert [chunk.score for chunk in chunks] == pytest.approx([score for score, _ in best])
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(best) - 1) + [True]


@pytest.mark.parametrize("several", [{"best_of": 4}, {"beam_search": BeamSearch(4)}], ids=["best of", "beams"])
@pytest.mark.parametrize("lost_at", [None, 0, 1, 4])
def test_the_first_answer_tells_the_log_probabilities_of_the_prompt(several: dict, lost_at: int | None) -> None:
    """Though they were known before the books were lost, and the prompt computed again."""
    books = UnreliableBooks(KvManager("boot"))
    prompt = prompt_of(9)
    sampling = SamplingParams() if "beam_search" in several else DRAWN
    with Harness(books=books, manager=books.manager) as harness:
        if lost_at is not None:
            harness.executor.before_step[lost_at] = books.restart
        harness.submit("a", prompt, 8, sampling=sampling, num_choices=2, prompt_logprobs=1, **several)
        first, last = harness.wait("a")
        found = [(each.token_id, each.logprob) for each in first.prompt_logprobs]
        assert last.prompt_logprobs == ()
        assert [token_id for token_id, _ in found] == prompt[1:]
        expected = [
            float(torch.log_softmax(next_logits(prompt[:end]).double(), 0)[prompt[end]])
            for end in range(1, len(prompt))
        ]
        assert [logprob for _, logprob in found] == pytest.approx(expected)
        harness.manager = books.manager


class TestBestOf:
    @pytest.mark.parametrize(("draws", "count"), [(2, 1), (8, 1), (8, 3), (6, 5)])
    def test_the_likeliest_come_best_first(self, draws: int, count: int) -> None:
        prompt = prompt_of(7)
        with Harness(num_blocks=200) as harness:
            harness.submit("a", prompt, 10, sampling=DRAWN, num_choices=count, best_of=draws)
            assert_best(harness, "a", expected(prompt, draws, count, 10))
            assert harness.last("a").usage.output_tokens == draws * 10
            assert sum(step.generated_tokens for step in harness.recorder.steps) == draws * 10
            assert harness.executor.computed_tokens == 7 + draws * 9
            for chunk in harness.wait("a"):
                assert (chunk.text, chunk.logprobs) == (ToyTokenizer.text(chunk.token_ids), ())
                assert chunk.finish_reason is FinishReason.LENGTH

    def test_an_answer_counts_by_its_own_length(self) -> None:
        ends = range(12)
        best = expected([1, 2], 8, 4, 12, ends)
        assert len({len(tokens) for _, tokens in best}) > 1
        with Harness(eos=ends) as harness:
            harness.submit("a", [1, 2], 12, sampling=DRAWN, num_choices=4, best_of=8)
            assert_best(harness, "a", best)
            for chunk in harness.wait("a"):
                by_token = chunk.token_ids[-1] in ends
                assert chunk.stop_token_id == (chunk.token_ids[-1] if by_token else None)
                assert chunk.text == ToyTokenizer.text(chunk.token_ids[: -1 if by_token else None])

    def test_an_answer_without_a_token_comes_last(self) -> None:
        best_of = BestOf()
        end = Chunk("a", 0, (), "", finish_reason=FinishReason.STOP)
        best_of.add(end, [])
        best_of.add(Chunk("a", 1, (3,), "d"), [-2.5])
        best_of.add(Chunk("a", 1, (4,), "e", finish_reason=FinishReason.LENGTH), [-1.5])
        usage = Usage(1, 0, 2, 0, 0.0, 0.0, 0.0)
        assert best_of.best(2, usage) == [
            Chunk("a", 0, (3, 4), "de", finish_reason=FinishReason.LENGTH, score=-2.0),
            replace(end, choice_index=1, score=-math.inf, usage=usage),
        ]

    def test_log_probabilities_if_asked_for(self) -> None:
        with Harness() as harness:
            harness.submit("a", [1, 2], 6, sampling=DRAWN, num_choices=2, best_of=5, logprobs=2)
            for chunk in harness.wait("a"):
                assert [each.token_id for each in chunk.logprobs] == list(chunk.token_ids)
                assert chunk.score == pytest.approx(sum(each.logprob for each in chunk.logprobs) / 6)
                assert {len(each.top) for each in chunk.logprobs} == {2}

    @pytest.mark.parametrize("best_of", [0, 3])
    def test_as_many_as_are_returned_are_streamed(self, best_of: int) -> None:
        with Harness() as harness:
            harness.submit("a", [1, 2], 6, sampling=DRAWN, num_choices=3, best_of=best_of)
            for choice in range(3):
                assert harness.tokens("a", choice) == answer([1, 2], 6, DRAWN, seed=11 + choice)
            assert len(harness.wait("a")) == 18
            assert {chunk.score for chunk in harness.wait("a")} == {None}

    @pytest.mark.usefixtures("no_foresight")
    def test_in_a_pool_so_small_that_draws_are_preempted(self) -> None:
        prompts = {f"r{number}": prompt_of(6 + number, number) for number in range(6)}
        with Harness(num_blocks=20) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 14, sampling=DRAWN, num_choices=2, best_of=4)
            for name, prompt in prompts.items():
                assert_best(harness, name, expected(prompt, 4, 2, 14))
            assert sum(step.preemptions for step in harness.recorder.steps) > 0

    def test_books_that_start_anew(self) -> None:
        books = UnreliableBooks(KvManager("boot"))
        with Harness(books=books, manager=books.manager) as harness:
            harness.executor.before_step[5] = books.restart
            harness.submit("a", prompt_of(9), 14, sampling=DRAWN, num_choices=2, best_of=4)
            assert_best(harness, "a", expected(prompt_of(9), 4, 2, 14))
            harness.manager = books.manager

    def test_an_abort_ends_each_choice_without_a_token(self) -> None:
        with Harness() as harness:
            harness.executor.before_step[5] = lambda: harness.engine.abort(["a"])
            harness.submit("a", [1], None, sampling=DRAWN, num_choices=2, best_of=4)
            chunks = harness.wait("a")
            assert [(chunk.choice_index, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
                (0, (), FinishReason.ABORT),
                (1, (), FinishReason.ABORT),
            ]
            assert chunks[-1].usage.output_tokens == 6 * 4
