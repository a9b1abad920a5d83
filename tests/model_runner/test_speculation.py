"""Guessing changes no answer: tokens, log-probabilities and texts are bit by bit those of an engine that never guesses.

The toy model repeats itself, so that some guesses are right and some are wrong; each test sees that both happen.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvmanager import KvManager
from kvmanager.types import HashAlgorithm, IndexKind
from model_runner.books import Growth, SequenceUpdate
from model_runner.generation import agreeing
from model_runner.request import Chunk, FinishReason, SamplingParams, Usage
from services.books_inprocess import InProcessBooks
from services.cache_options import CacheOptions
from tests.model_runner.engine_harness import Harness
from tests.model_runner.test_engine import UnreliableBooks
from tests.model_runner.toy_model import ToyExecutor, ToyTokenizer, answer, habitual_logits

GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=1.0, seed=5)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
OUTPUTS = 60


@contextmanager
def speculating(tokens: int = 4, *, block_size: int = 4, **options: Any) -> Iterator[Harness]:
    executor = ToyExecutor(block_size, habitual_logits)
    with Harness(block_size=block_size, executor=executor, speculative_tokens=tokens, **options) as harness:
        yield harness


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40), k=length)


class NothingToSpare(InProcessBooks):
    """Books that have no block for a guess."""

    def extend(self, updates: Sequence[SequenceUpdate]) -> Growth:
        return Growth((), frozenset(update.sequence_id for update in updates))


def right(prompt: Sequence[int], sampling: SamplingParams = GREEDY, choice: int = 0, count: int = OUTPUTS) -> list[int]:
    """The answer, made without any engine."""
    return answer(prompt, count, sampling, (sampling.seed or 0) + choice, habitual_logits)


def seen(harness: Harness, name: str, choice: int = 0) -> tuple[object, ...]:
    """All that a client sees of a choice, but for how it is cut into chunks."""
    chunks = [item for item in harness.wait(name) if item.choice_index == choice]
    assert all(isinstance(chunk, Chunk) for chunk in chunks), chunks
    last = chunks[-1]
    return (
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        [position for chunk in chunks for position in chunk.logprobs],
        "".join(chunk.text for chunk in chunks),
        (last.finish_reason, last.stop_token_id, last.stop_string),
    )


def usage_of(harness: Harness, name: str) -> Usage:
    usage = harness.last(name).usage
    assert usage is not None
    return usage


def assert_both(usage: Usage) -> None:
    """Some guesses were right, and some wrong."""
    assert 0 < usage.accepted_tokens < usage.drafted_tokens


class TestTheSameAnswer:
    @SAMPLINGS
    @pytest.mark.parametrize("block_size", [1, 4, 16])
    @pytest.mark.parametrize("tokens", [1, 4, 9])
    def test_alone(self, sampling: SamplingParams, block_size: int, tokens: int) -> None:
        prompt = prompt_of(30)
        outcomes = []
        for guesses in (0, tokens):
            with speculating(guesses, block_size=block_size, num_blocks=129) as harness:
                harness.submit("a", prompt, OUTPUTS, sampling=sampling, logprobs=3)
                outcomes.append(seen(harness, "a"))
                usage = usage_of(harness, "a")
        assert outcomes[0] == outcomes[1]
        assert outcomes[1][0] == right(prompt, sampling)
        assert_both(usage)

    @SAMPLINGS
    @pytest.mark.parametrize("index", IndexKind)
    def test_choices_that_share_blocks(self, sampling: SamplingParams, index: IndexKind) -> None:
        """Three choices of one prompt; then a prompt that begins like the first of them, tokens of drafts included."""
        prompt = prompt_of(30)
        with speculating(cache=CacheOptions(HashAlgorithm.SHA256, index), num_blocks=129) as harness:
            harness.submit("a", prompt, OUTPUTS, sampling=sampling, num_choices=3)
            for choice in range(3):
                assert harness.tokens("a", choice) == right(prompt, sampling, choice)
            assert_both(usage_of(harness, "a"))
            tokens = harness.tokens("a")
            # 87 tokens as before, and one that is another.
            turn = [*prompt, *tokens[:57], tokens[57] ^ 1, 2]
            harness.submit("b", turn, OUTPUTS, sampling=sampling)
            assert harness.tokens("b") == right(turn, sampling)
            hits = {IndexKind.NONE: 0, IndexKind.HASH: 84, IndexKind.RADIX: 87}
            assert usage_of(harness, "b").cached_tokens == hits[index]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_under_rules_that_depend_on_the_tokens_so_far(self, temperature: float) -> None:
        """Each draw is made as if the guesses before it had been taken: their counts, their words, their number."""
        rules = SamplingParams(
            temperature,
            seed=5,
            repetition_penalty=1.05,
            presence_penalty=0.1,
            frequency_penalty=0.05,
            logit_bias=((3, 1.0),),
            bad_words=((1, 2), (7,), (20, 21, 22)),
        )
        outcomes = []
        for guesses in (0, 6):
            with speculating(guesses, eos=range(0, 40, 3)) as harness:
                harness.submit("a", prompt_of(30), OUTPUTS, sampling=rules, min_tokens=40, logprobs=3)
                outcomes.append(seen(harness, "a"))
                usage = usage_of(harness, "a")
        assert outcomes[0] == outcomes[1]
        assert_both(usage)

    @pytest.mark.parametrize("guesses", [0, 6])
    def test_until_no_token_is_possible(self, guesses: int) -> None:
        """Only three tokens are allowed, and after 9 8 7 none may come: the answer ends there, amid a draft or not."""
        sampling = SamplingParams(
            allowed_token_ids=frozenset({7, 8, 9}),
            logit_bias=((9, 50.0),),
            bad_words=((7, 7), (7, 8), (7, 9), (8, 8), (8, 9), (9, 9), (9, 7)),
        )
        with speculating(guesses) as harness:
            harness.submit("a", [1, 9, 8, 7, 3, 9, 8, 7, 2], OUTPUTS, sampling=sampling)
            assert harness.tokens("a") == [9, 8, 7]
            assert harness.last("a").finish_reason is FinishReason.STOP

    def test_the_best_of_several_and_their_scores(self) -> None:
        outcomes = []
        for guesses in (0, 6):
            with speculating(guesses, num_blocks=201) as harness:
                harness.submit("a", prompt_of(30), OUTPUTS, sampling=DRAWN, num_choices=2, best_of=4)
                usage = usage_of(harness, "a")
                scores = {chunk.choice_index: chunk.score for chunk in harness.wait("a") if chunk.finish_reason}
                outcomes.append((scores, [seen(harness, "a", choice) for choice in range(2)]))
        assert outcomes[0] == outcomes[1]
        assert_both(usage)

    def test_a_request_that_leaves_nothing_in_the_cache_leaves_no_guesses_there(self) -> None:
        prompt = prompt_of(30)
        with speculating() as harness:
            harness.submit("a", prompt, OUTPUTS, skip_cache_write=True)
            assert harness.tokens("a") == right(prompt)
            assert_both(usage_of(harness, "a"))
            assert harness.pool.occupancy().cached_blocks == 0

    @SAMPLINGS
    def test_in_chunks_under_a_small_budget(self, sampling: SamplingParams) -> None:
        prompts = {f"r{number}": prompt_of(20 + number, number) for number in range(5)}
        with speculating(max_batched_tokens=9, prefill_chunk_tokens=3, num_blocks=201) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, OUTPUTS, sampling=sampling)
            for name, prompt in prompts.items():
                assert harness.tokens(name) == right(prompt, sampling)
            assert max(map(sum, harness.executor.steps)) <= 9
            assert_both(usage_of(harness, "r0"))

    @SAMPLINGS
    def test_with_preemptions(self, sampling: SamplingParams, no_foresight: None) -> None:
        prompts = {f"r{number}": prompt_of(16, number) for number in range(6)}
        with speculating(num_blocks=50, block_size=4) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, OUTPUTS, sampling=sampling)
            for name, prompt in prompts.items():
                assert harness.tokens(name) == right(prompt, sampling)
            assert sum(usage_of(harness, name).preemptions for name in prompts) > 0
            assert sum(usage_of(harness, name).accepted_tokens for name in prompts) > 0

    @pytest.mark.parametrize("seed", range(4))
    def test_with_books_that_fail_at_random(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_runner.engine.RETRY_SECONDS", 0.001)
        books = UnreliableBooks(KvManager("boot"), random.Random(seed), 0.15)
        prompts = {f"r{number}": prompt_of(14 + number, number) for number in range(6)}
        with speculating(num_blocks=101, books=books, manager=books.manager) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                harness.submit(name, prompt, OUTPUTS, sampling=DRAWN, num_choices=1 + number % 3)
            for number, (name, prompt) in enumerate(prompts.items()):
                for choice in range(1 + number % 3):
                    assert harness.tokens(name, choice) == right(prompt, DRAWN, choice)
            assert books.failed_verbs >= {"extend", "truncate"}
            books.rate = 0.0
            harness.submit("last", [1], 1)
            harness.wait("last")

    def test_with_books_that_start_anew(self) -> None:
        books = UnreliableBooks(KvManager("boot"))
        prompt = prompt_of(30)
        with speculating(books=books, manager=books.manager) as harness:
            harness.executor.before_step[12] = books.restart
            harness.submit("a", prompt, OUTPUTS)
            assert harness.tokens("a") == right(prompt)
            assert_both(usage_of(harness, "a"))
            harness.manager = books.manager


class TestTheEnd:
    """An answer ends where it would have ended, also in the midst of tokens that were guessed rightly."""

    prompt = prompt_of(30)
    expected = right(prompt)

    def ends(self, **options: Any) -> tuple[object, ...]:
        """What is seen of the answer with guesses, which equals what is seen without."""
        outcomes = []
        for guesses in (0, 6):
            with speculating(guesses, eos=options.get("eos", ())) as harness:
                harness.submit("a", self.prompt, **{key: value for key, value in options.items() if key != "eos"})
                outcomes.append(seen(harness, "a"))
                self.last_chunk = harness.last("a")
        assert outcomes[0] == outcomes[1]
        return outcomes[1]

    def test_at_every_max_tokens(self) -> None:
        for count in range(1, OUTPUTS):
            tokens, _, text, (reason, *_) = self.ends(max_tokens=count)
            assert (tokens, reason) == (self.expected[:count], FinishReason.LENGTH)
            assert text == ToyTokenizer.text(self.expected[:count])

    def test_at_every_stop_token(self) -> None:
        amid = 0
        for token in set(self.expected):
            first = self.expected.index(token)
            tokens, _, text, why = self.ends(max_tokens=OUTPUTS, stop_token_ids=[token], ignore_eos=True)
            assert tokens == self.expected[: first + 1]
            assert text == ToyTokenizer.text(self.expected[:first])
            assert why == (FinishReason.STOP, token, None)
            amid += len(self.last_chunk.token_ids) > 1
        assert amid > 0, "no stop token was among guesses that were right"

    def test_at_every_stop_string(self) -> None:
        whole = ToyTokenizer.text(self.expected)
        amid = 0
        for place in range(OUTPUTS - 3):
            stop = whole[place : place + 3]
            _, _, text, why = self.ends(max_tokens=OUTPUTS, stop_strings=(stop,))
            assert text == whole[: whole.index(stop)]
            assert why == (FinishReason.STOP, None, stop)
            amid += len(self.last_chunk.token_ids) > 1
        assert amid > 0

    def test_at_an_end_token(self) -> None:
        token = self.expected[-1]
        tokens, _, text, why = self.ends(max_tokens=OUTPUTS, eos=[token])
        assert tokens == self.expected[: self.expected.index(token) + 1]
        assert text == ToyTokenizer.text(tokens[:-1])
        assert why == (FinishReason.STOP, token, None)

    @pytest.mark.parametrize("longest", range(31, 50))
    def test_at_the_longest_sequence(self, longest: int) -> None:
        """No position beyond the model's is ever computed."""
        with speculating(6, max_model_tokens=longest) as harness:
            harness.submit("a", self.prompt, None)
            assert harness.tokens("a") == self.expected[: longest + 1 - 30]
            assert harness.executor.longest == longest

    @pytest.mark.parametrize("num_blocks", range(9, 16))
    def test_in_a_pool_that_it_fills(self, num_blocks: int) -> None:
        with speculating(6, num_blocks=num_blocks) as harness:
            harness.submit("a", self.prompt, None)
            assert harness.tokens("a") == self.expected[: (num_blocks - 1) * 4 + 1 - 30]


class TestTheCost:
    def test_a_step_brings_all_tokens_that_were_guessed_rightly_and_one(self) -> None:
        with speculating(3) as harness:
            harness.submit("a", prompt_of(30), OUTPUTS)
            usage = usage_of(harness, "a")
            assert usage.output_tokens == OUTPUTS
            assert len(harness.executor.steps) == OUTPUTS - usage.accepted_tokens
            assert harness.executor.computed_tokens == 30 + (len(harness.executor.steps) - 1) + usage.drafted_tokens
            assert sum(report.generated_tokens for report in harness.recorder.steps) == OUTPUTS

    def test_nothing_is_guessed_unless_it_is_asked_for(self) -> None:
        with Harness(executor=ToyExecutor(4, habitual_logits)) as harness:
            harness.submit("a", prompt_of(30), OUTPUTS)
            usage = usage_of(harness, "a")
            assert (usage.drafted_tokens, usage.accepted_tokens) == (0, 0)
            assert harness.executor.steps == [[30], *[[1]] * (OUTPUTS - 1)]

    def test_prompts_have_the_budget_first(self) -> None:
        """While a prompt of 40 comes in by what is left of 9 tokens, the one that decodes gets one token a step."""
        with speculating(4, max_batched_tokens=9, num_blocks=201) as harness:
            harness.executor.before_step[30] = lambda: harness.submit("late", prompt_of(40, 1), 2)
            harness.submit("a", prompt_of(9), 120)
            assert harness.tokens("a") == right(prompt_of(9), count=120)
            assert harness.tokens("late") == right(prompt_of(40, 1), count=2)
            assert harness.executor.steps[31:36] == [[1, 8]] * 5
            assert max(step[0] for step in harness.executor.steps[1:]) == 5

    def test_without_spare_blocks_drafts_are_cut_to_the_room_that_there_is(self) -> None:
        manager = KvManager("boot")
        with speculating(9, block_size=16, books=NothingToSpare(manager), manager=manager) as harness:
            harness.submit("a", prompt_of(30), OUTPUTS)
            assert harness.tokens("a") == right(prompt_of(30))
            # The last steps are cut by the end of the answer.
            widths = {step[0] for step in harness.executor.steps[1:-9]}
            assert {1, 10} < widths < set(range(1, 11))

    def test_guesses_take_nobodys_blocks(self, no_foresight: None) -> None:
        """Two that fill the pool exactly, and guess all the time: neither loses its blocks."""
        prompts = [prompt_of(8, 1), prompt_of(8, 2)]
        with speculating(9, num_blocks=1 + 2 * 17) as harness:
            for number, prompt in enumerate(prompts):
                harness.submit(str(number), prompt, OUTPUTS)
            for number, prompt in enumerate(prompts):
                assert harness.tokens(str(number)) == right(prompt)
                assert usage_of(harness, str(number)).preemptions == 0


@pytest.mark.parametrize(
    ("draft", "drawn", "expected"),
    [((), [], 0), ((1,), [2], 0), ((1, 2), [1, 2], 2), ((1, 2, 3), [1, 9, 3], 1), ((5, 6), [4, 6], 0)],
)
def test_a_draft_counts_up_to_the_first_difference(draft: tuple[int, ...], drawn: list[int], expected: int) -> None:
    assert agreeing(draft, drawn) == expected
