"""Beam searches through the real engine, on the toy model: their answers, their blocks, whatever happens meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvmanager import KvManager
from kvmanager.types import IndexKind
from model_runner.batch import BatchEntry
from model_runner.books import Admission, AllocationRequest, BlockGrant, CopyOrder, Growth, SequenceUpdate
from model_runner.engine_types import Failure, FailureKind
from model_runner.request import (
    BeamSearch,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    Retention,
    SamplingParams,
    StopConditions,
)
from model_runner.waiting_line import SchedulingPolicy
from services.books_inprocess import InProcessBooks
from services.cache_options import CacheOptions
from tests.model_runner.engine_harness import Harness
from tests.model_runner.naive_beams import Answer, naive_search
from tests.model_runner.test_engine import UnreliableBooks
from tests.model_runner.toy_model import VOCAB_SIZE, ToyExecutor, ToyTokenizer, answer, next_logits

ENDS = range(10)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def answers(harness: Harness, name: str) -> list[Answer]:
    """What a search has delivered: one chunk for each choice, best first."""
    chunks = harness.wait(name)
    assert not any(isinstance(chunk, Failure) for chunk in chunks), chunks
    assert [chunk.choice_index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return [(chunk.score, chunk.token_ids) for chunk in chunks]


def assert_answers(harness: Harness, name: str, expected: list[Answer]) -> None:
    found = answers(harness, name)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    # The engine adds up in float32.
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5, abs=1e-5)


def submit(harness: Harness, name: str, prompt: Sequence[int], width: int, limit: int | None, **options: Any) -> None:
    params = {key: options.pop(key) for key in ("length_penalty", "early_stopping") if key in options}
    options.setdefault("num_choices", width)
    harness.submit(name, prompt, limit, beam_search=BeamSearch(width, **params), **options)


class ByThrees:
    """A form whose i-th token is i modulo 3, and which is complete behind one of 30 or more."""

    def __init__(self, length: int = 0, is_over: bool = False) -> None:
        self.length = length
        self.is_over = is_over

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


class Watched(ToyExecutor):
    """Notes what the books have given out before each step, and what each step computes."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.harness: Harness | None = None
        self.allocated: list[int] = []
        self.copied: list[int] = []

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> torch.Tensor:
        logits = super().execute(entries, copies)
        pool = self.harness.pool
        self.allocated.append(pool.totals.allocated_blocks)
        self.copied.append(len(copies))
        # As few blocks as there are different contents: whatever two beams have in common they share.
        size = self.block_size
        contents = set()
        for entry in entries:
            history = [self.slots[self._slot(entry, at)] for at in range(entry.first_position + len(entry.token_ids))]
            contents |= {tuple(history[: start + size]) for start in range(0, len(history), size)}
        assert pool.occupancy().held_blocks == len(contents)
        assert pool.check().ok
        return logits


class TestTheBlocks:
    @pytest.mark.parametrize("block_size", [1, 2, 8, 16])
    @pytest.mark.parametrize(("width", "length"), [(2, 70), (4, 1), (4, 33), (6, 64)])
    def test_no_more_than_must_be(self, width: int, length: int, block_size: int) -> None:
        """What was proved of the books, by `test_waste.py`, holds of the engine."""
        executor = Watched(block_size)
        with Harness(executor=executor, block_size=block_size, num_blocks=1_000, max_batched_tokens=2_000) as harness:
            executor.harness = harness
            submit(harness, "a", prompt_of(length), width, 40)
            assert_answers(harness, "a", naive_search(prompt_of(length), width, 40))
            # The prompt once, and then each beam its own token.
            assert executor.steps == [[length]] + [[1] * width] * 39
            new = [after - before for before, after in zip(executor.allocated, executor.allocated[1:], strict=False)]
            assert max(new) <= width
            assert max(executor.copied) <= width - 1
            assert harness.pool.totals.forks > width

    def test_ids_are_never_used_twice(self) -> None:
        names: list[str] = []

        class Noting(InProcessBooks):
            def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
                names.extend(child_ids)
                super().fork(parent_id, child_ids)

        manager = KvManager("boot")
        with Harness(books=Noting(manager), manager=manager) as harness:
            submit(harness, "a", prompt_of(5), 4, 30)
            harness.wait("a")
        assert len(names) > 20
        assert sorted(names) == sorted(f"a/{number}" for number in range(1, len(names) + 1))

    def test_a_prompt_in_chunks(self) -> None:
        with Harness(prefill_chunk_tokens=7) as harness:
            submit(harness, "a", prompt_of(40), 4, 8)
            assert_answers(harness, "a", naive_search(prompt_of(40), 4, 8))
            assert harness.executor.steps == [[7]] * 5 + [[5]] + [[1] * 4] * 7

    def test_a_second_search_hits_the_prompt(self) -> None:
        with Harness(num_blocks=200) as harness:
            for name, cached in (("cold", 0), ("warm", 20)):
                submit(harness, name, prompt_of(21), 3, 8)
                assert harness.last(name).usage.cached_tokens == cached
            assert answers(harness, "warm") == answers(harness, "cold")
            assert_answers(harness, "warm", naive_search(prompt_of(21), 3, 8))


MIXED = [{"length_penalty": penalty, "early_stopping": way} for penalty in (1.0, 0.4) for way in EarlyStopping]


class TestPreemption:
    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("chunk", [0, 5])
    @pytest.mark.parametrize("num_blocks", [24, 40])
    def test_in_a_pool_so_small_that_searches_are_preempted(self, num_blocks: int, chunk: int) -> None:
        prompts = {f"r{number}": prompt_of(6 + number, number) for number in range(12)}
        with Harness(num_blocks=num_blocks, prefill_chunk_tokens=chunk, eos=[0, 1]) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                if number % 3:
                    submit(harness, name, prompt, 2 + number % 3, 14, **MIXED[number % 6])
                else:
                    harness.submit(name, prompt, 14, ignore_eos=True)
            for number, (name, prompt) in enumerate(prompts.items()):
                if number % 3:
                    expected = naive_search(prompt, 2 + number % 3, 14, eos=[0, 1], **MIXED[number % 6])
                    assert_answers(harness, name, expected)
                else:
                    assert harness.tokens(name) == answer(prompt, 14)
            preempted = sum(
                usage.preemptions
                for name in prompts
                if (usage := harness.last(name).usage) and harness.last(name).score
            )
            assert preempted > 0

    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("index", IndexKind)
    def test_however_prefixes_are_kept(self, index: IndexKind) -> None:
        with Harness(num_blocks=24, cache=CacheOptions(index=index)) as harness:
            for number in range(6):
                submit(harness, str(number), [*prompt_of(7), *prompt_of(3, number)], 3, 12)
            for number in range(6):
                expected = naive_search([*prompt_of(7), *prompt_of(3, number)], 3, 12)
                assert_answers(harness, str(number), expected)
            assert sum(step.preemptions for step in harness.recorder.steps) > 0

    @pytest.mark.usefixtures("no_foresight")
    def test_the_search_that_counts_least_gives_way(self) -> None:
        with Harness(num_blocks=24, policy=SchedulingPolicy.PRIORITY) as harness:
            for number in range(5):
                submit(harness, str(number), prompt_of(6 + number, number), 3, 12, queue_priority=-20 * number)
            for number in range(5):
                assert_answers(harness, str(number), naive_search(prompt_of(6 + number, number), 3, 12))
            assert sum(step.preemptions for step in harness.recorder.steps) > 0
            assert harness.last("4").usage.preemptions == 0

    def test_a_search_that_pins_leave_no_room_for_waits_and_is_not_preempted_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """8 of 16 blocks are pinned, and the search comes to need 14: it waits until the pins end."""
        monkeypatch.setattr("model_runner.engine.STARVED_SECONDS", 0.001)
        now = [0.0]

        class Patient(InProcessBooks):
            refusals = 0

            def allocate(self, request: AllocationRequest) -> Admission | None:
                admission = super().allocate(request)
                self.refusals += admission is None
                if self.refusals == 3:
                    now[0] = 100.0
                return admission

        manager = KvManager("boot", clock=lambda: now[0])
        with Harness(books=Patient(manager), manager=manager, num_blocks=17) as harness:
            harness.submit("pinned", prompt_of(32, 1), 1, retention=Retention(pin_seconds=50))
            harness.wait("pinned")
            submit(harness, "a", prompt_of(9), 4, 12)
            assert_answers(harness, "a", naive_search(prompt_of(9), 4, 12))
            assert harness.last("a").usage.preemptions == 1

    def test_a_search_that_comes_back_computes_what_its_beams_share_once(self) -> None:
        """Without a prefix cache: 30 tokens of the prompt are computed twice, not once more for each beam."""
        books = UnreliableBooks(KvManager("boot"))
        books._cache = CacheOptions(index=IndexKind.NONE)
        with Harness(books=books, manager=books.manager) as harness:
            harness.executor.before_step[4] = books.restart
            submit(harness, "a", prompt_of(30), 4, 10)
            assert_answers(harness, "a", naive_search(prompt_of(30), 4, 10))
            # Behind the prompt each beam has at most 4 tokens to compute again, and 9 steps to take.
            assert 30 + 30 <= harness.executor.computed_tokens - 9 * 4 <= 30 + 30 + 4 * 4
            harness.manager = books.manager

    @pytest.mark.parametrize("width", [2, 3, 6])
    def test_a_search_ends_where_its_beams_no_longer_fit(self, width: int) -> None:
        """16 blocks of 4: all share the 2 that the prompt fills, and each has its part of the rest."""
        limit = (2 + 14 // width) * 4 - 9 + 1
        with Harness(num_blocks=17) as harness:
            submit(harness, "a", prompt_of(9), width, None)
            assert_answers(harness, "a", naive_search(prompt_of(9), width, limit))
            submit(harness, "b", prompt_of(9), width, 1_000, early_stopping=EarlyStopping.NEVER)
            assert_answers(harness, "b", naive_search(prompt_of(9), width, limit, early_stopping=EarlyStopping.NEVER))
            assert all(step.preemptions == 0 for step in harness.recorder.steps)

    def test_a_prompt_that_fills_the_pool_gets_one_token(self) -> None:
        with Harness(num_blocks=5) as harness:
            submit(harness, "a", prompt_of(16), 3, None)
            assert_answers(harness, "a", naive_search(prompt_of(16), 3, 1))

    def test_a_search_that_outgrows_its_quota_is_refused(self) -> None:
        with Harness() as harness:
            harness.submit("first", [1], 1, cache_salt="s")
            harness.wait("first")
            harness.pool.set_quota("s", 6)
            submit(harness, "a", prompt_of(9), 4, 30, cache_salt="s")
            failure = harness.wait("a")[-1]
            assert isinstance(failure, Failure)
            assert failure.kind is FailureKind.REQUEST
            assert "quota of 6" in failure.sentence
            submit(harness, "b", prompt_of(9), 2, 5, cache_salt="s")
            assert_answers(harness, "b", naive_search(prompt_of(9), 2, 5))


class TestFaults:
    @pytest.mark.parametrize("step", [0, 1, 2, 7])
    def test_books_that_start_anew(self, step: int) -> None:
        books = UnreliableBooks(KvManager("boot"))
        with Harness(books=books, manager=books.manager) as harness:
            harness.executor.before_step[step] = books.restart
            submit(harness, "a", prompt_of(9), 4, 12)
            assert_answers(harness, "a", naive_search(prompt_of(9), 4, 12))
            harness.manager = books.manager

    @pytest.mark.parametrize("seed", range(6))
    def test_verbs_that_fail_at_random(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_runner.engine.RETRY_SECONDS", 0.001)
        books = UnreliableBooks(KvManager("boot"), random.Random(seed), 0.08)
        prompts = {f"r{number}": prompt_of(4 + number, number) for number in range(6)}
        with Harness(num_blocks=40, books=books, manager=books.manager) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                submit(harness, name, prompt, 1 + number % 4, 10)
            for number, (name, prompt) in enumerate(prompts.items()):
                assert_answers(harness, name, naive_search(prompt, 1 + number % 4, 10))
            assert books.failures > 0
            books.rate = 0.0
            harness.submit("last", [1], 1)
            harness.wait("last")

    def test_aborts_at_random_moments_leave_nothing(self) -> None:
        rng = random.Random(5)
        with Harness(num_blocks=40, max_sequences=8) as harness:
            for number in range(120):
                submit(harness, str(number), prompt_of(rng.randint(1, 12), number), rng.randint(1, 4), 10)
                step = len(harness.executor.steps) + rng.randrange(12)
                harness.executor.before_step[step] = lambda name=str(number): harness.engine.abort([name])
                if number % 4 == 3:
                    harness.wait(str(number))
            reasons = {harness.last(str(number)).finish_reason for number in range(120)}
            assert FinishReason.ABORT in reasons

    def test_an_abort_ends_each_choice_without_a_token(self) -> None:
        with Harness() as harness:
            harness.executor.before_step[5] = lambda: harness.engine.abort(["a"])
            submit(harness, "a", [1], 4, None, num_choices=3)
            chunks = harness.wait("a")
            assert [chunk.choice_index for chunk in chunks] == [0, 1, 2]
            assert {(chunk.token_ids, chunk.text, chunk.finish_reason) for chunk in chunks} == {
                ((), "", FinishReason.ABORT)
            }
            assert chunks[-1].usage.output_tokens == 6 * 4


class LateBooks(InProcessBooks):
    """Books over a slow wire: a block comes a call later than asked for, its copy with whoever is answered first."""

    def __init__(self, manager: KvManager, rng: random.Random) -> None:
        super().__init__(manager)
        self.rng = rng
        self.late: dict[str, BlockGrant] = {}
        self.copies: list[CopyOrder] = []
        self.stalls = self.strays = 0

    def append(self, updates: Sequence[SequenceUpdate]) -> Growth | None:
        growth = super().append([each for each in updates if each.sequence_id not in self.late])
        if growth is None:
            return None
        fresh = {grant.sequence_id: grant for grant in growth.grants}
        grants, stalled = [], set()
        due, self.copies = self.copies, []
        for name in [each.sequence_id for each in updates]:
            if name in fresh and self.rng.random() < 0.4:
                self.late[name] = replace(fresh[name], copies=())
                self.copies += fresh[name].copies
                stalled.add(name)
            else:
                grants.append(self.late.pop(name, None) or fresh.get(name) or BlockGrant(name, 1_000_000, ()))
        if grants:
            grants[0] = replace(grants[0], copies=(*due, *grants[0].copies))
            self.strays += bool(due)
        else:
            self.copies = due + self.copies
        self.stalls += len(stalled)
        return Growth(grants, frozenset(stalled))

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        for each in updates:
            self.late.pop(each.sequence_id, None)
        super().free(updates, preempted=preempted)


class TestSlowBooks:
    @pytest.mark.parametrize("seed", range(6))
    def test_copies_come_in_time_whoever_waits(self, seed: int) -> None:
        manager = KvManager("boot")
        books = LateBooks(manager, random.Random(seed))
        with Harness(books=books, manager=manager, num_blocks=200) as harness:
            for number in range(4):
                submit(harness, str(number), prompt_of(5 + number, number), 1 + number, 14)
                harness.submit(f"n{number}", prompt_of(6 + number, number), 14, num_choices=3)
            for number in range(4):
                assert_answers(harness, str(number), naive_search(prompt_of(5 + number, number), 1 + number, 14))
                for choice in range(3):
                    assert harness.tokens(f"n{number}", choice) == answer(prompt_of(6 + number, number), 14)
            assert min(books.stalls, books.strays) > 0

    @pytest.mark.parametrize("seed", range(4))
    def test_copies_of_beams_that_wait_for_others(self, seed: int) -> None:
        """Then a step may have a copy to carry out, and no work."""
        manager = KvManager("boot")
        books = LateBooks(manager, random.Random(seed))
        with Harness(books=books, manager=manager) as harness:
            submit(harness, "a", prompt_of(7), 4, 14)
            assert_answers(harness, "a", naive_search(prompt_of(7), 4, 14))
            assert min(books.stalls, books.strays) > 0
