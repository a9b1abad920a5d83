"""The engine over the toy model: every answer equals one computed without an engine, whatever happens around it."""

import random
import threading

import pytest

from kvmanager import KvManager
from kvmanager.types import Append, PoolSpec
from model_runner.books import BOOKS_TROUBLE, BooksUnreachable
from model_runner.engine_types import DuplicateRequest, EngineState, EngineStopped, Failure, FailureKind, QueueFull
from model_runner.request import FinishReason, SamplingParams
from services.books_inprocess import InProcessBooks
from tests.model_runner.engine_harness import Harness
from tests.model_runner.toy_model import ToyTokenizer, answer

DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


def prompt_of(length, seed=0):
    return random.Random(seed).choices(range(40), k=length)


class TestOneRequest:
    @pytest.mark.parametrize("block_size", [1, 4, 8, 32])
    @pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
    def test_greedy(self, block_size, length):
        prompt = prompt_of(length)
        with Harness(block_size=block_size) as harness:
            harness.submit("a", prompt, 12)
            assert harness.tokens("a") == answer(prompt, 12)
            assert harness.text("a") == ToyTokenizer.text(answer(prompt, 12))

    def test_in_chunks_of_seven(self):
        prompt = prompt_of(40)
        with Harness(prefill_chunk_tokens=7) as harness:
            harness.submit("a", prompt, 3)
            assert harness.tokens("a") == answer(prompt, 3)
            assert harness.executor.steps[:6] == [[7]] * 5 + [[5]]

    def test_usage_of_a_cold_and_a_warm_prompt(self):
        prompt = prompt_of(10)
        with Harness() as harness:
            for name, cached in (("cold", 0), ("warm", 8)):
                harness.submit(name, prompt, 2)
                usage = harness.last(name).usage
                assert (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens) == (10, cached, 2)
                assert harness.tokens(name) == answer(prompt, 2)
            assert harness.executor.computed_tokens == (10 + 1) + (2 + 1)

    def test_the_next_turn_hits_generated_tokens(self):
        prompt = prompt_of(4)
        with Harness() as harness:
            harness.submit("first", prompt, 9)
            turn = prompt + harness.tokens("first") + [5, 6]
            harness.submit("second", turn, 1)
            # 12 of the 13 tokens before have K/V: the last one was sampled and never computed.
            assert harness.last("second").usage.cached_tokens == 12

    def test_skipping_the_cache(self):
        prompt = prompt_of(10)
        with Harness() as harness:
            for name in ("a", "b"):
                harness.submit(name, prompt, 1, skip_cache_read=True)
                assert harness.last(name).usage.cached_tokens == 0

    def test_salts_part(self):
        prompt = prompt_of(10)
        with Harness() as harness:
            cached = []
            for number, salt in enumerate(["x", "y", "x"]):
                harness.submit(str(number), prompt, 1, cache_salt=salt)
                cached.append(harness.last(str(number)).usage.cached_tokens)
            assert cached == [0, 0, 8]


class TestTheEnd:
    def test_max_tokens(self):
        with Harness() as harness:
            harness.submit("a", [1], 1)
            assert harness.last("a").finish_reason is FinishReason.LENGTH
            assert len(harness.tokens("a")) == 1

    def test_an_end_token_is_told_and_not_shown(self):
        expected = answer([1], 6)
        with Harness(eos=[expected[5]]) as harness:
            first = expected.index(expected[5])
            harness.submit("a", [1], 20)
            last = harness.last("a")
            assert (last.finish_reason, last.stop_token_id) == (FinishReason.STOP, expected[5])
            assert harness.tokens("a") == expected[: first + 1]
            assert harness.text("a") == ToyTokenizer.text(expected[:first])

    def test_end_tokens_can_be_ignored(self):
        expected = answer([1], 20)
        with Harness(eos=range(40)) as harness:
            harness.submit("a", [1], 20, ignore_eos=True)
            assert harness.tokens("a") == expected

    def test_stop_tokens(self):
        expected = answer([1], 20)
        with Harness() as harness:
            harness.submit("a", [1], 20, stop_token_ids=[expected[3]], ignore_eos=True)
            assert harness.tokens("a") == expected[: expected.index(expected[3]) + 1]

    def test_stop_strings(self):
        expected = answer([1], 20)
        stop = ToyTokenizer.text(expected[4:6])
        with Harness() as harness:
            harness.submit("a", [1], 20, stop_strings=("nowhere", stop))
            text = ToyTokenizer.text(expected)
            assert harness.text("a") == text[: text.index(stop)]
            last = harness.last("a")
            assert (last.finish_reason, last.stop_string) == (FinishReason.STOP, stop)

    def test_a_prompt_that_fills_the_pool_gets_one_token(self):
        prompt = prompt_of(16)
        with Harness(num_blocks=5) as harness:
            harness.submit("a", prompt, None)
            assert harness.tokens("a") == answer(prompt, 1)
            assert harness.last("a").finish_reason is FinishReason.LENGTH

    def test_without_max_tokens_the_sequence_is_filled(self):
        with Harness(num_blocks=5, max_model_tokens=15) as harness:
            harness.submit("a", [1, 2, 3], None)
            assert harness.tokens("a") == answer([1, 2, 3], 15 - 3 + 1)


class TestSampling:
    def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(self):
        prompts = {str(number): prompt_of(5 + number, number) for number in range(12)}
        with Harness() as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 10, sampling=DRAWN)
            for name, prompt in prompts.items():
                assert harness.tokens(name) == answer(prompt, 10, DRAWN, seed=11)

    def test_without_a_seed_answers_differ(self):
        with Harness() as harness:
            for name in ("a", "b"):
                harness.submit(name, [1, 2], 16, sampling=SamplingParams(temperature=1.0))
            assert harness.tokens("a") != harness.tokens("b")

    @pytest.mark.parametrize("length", [7, 8])
    def test_choices_share_the_prompt(self, length):
        prompt = prompt_of(length)
        with Harness() as harness:
            harness.submit("a", prompt, 10, sampling=DRAWN, num_choices=5)
            for choice in range(5):
                assert harness.tokens("a", choice) == answer(prompt, 10, DRAWN, seed=11 + choice)
            assert harness.executor.computed_tokens == length + 5 * 9
            assert harness.last("a").usage.output_tokens == 50
            assert sum(item.usage is not None for item in harness.wait("a")) == 1
            assert harness.pool.totals.forks == 4
            assert harness.pool.totals.copies == (4 if length == 7 else 0)

    def test_choices_that_end_at_once_are_not_forked(self):
        with Harness() as harness:
            harness.submit("a", [1, 2, 3], 1, sampling=DRAWN, num_choices=3)
            assert [len(harness.tokens("a", choice)) for choice in range(3)] == [1, 1, 1]
            assert harness.pool.totals.forks == 0

    def test_choices_may_end_at_different_times(self):
        prompt, ends = prompt_of(6), []
        for choice in range(4):
            ends.append(answer(prompt, 12, DRAWN, seed=11 + choice))
        stop = {ends[0][0], ends[1][4], ends[2][8]}
        with Harness() as harness:
            harness.submit("a", prompt, 12, sampling=DRAWN, num_choices=4, stop_token_ids=stop)
            for choice, expected in enumerate(ends):
                cut = next((index + 1 for index, token in enumerate(expected) if token in stop), 12)
                assert harness.tokens("a", choice) == expected[:cut]

    def test_logprobs_come_if_asked_for(self):
        with Harness() as harness:
            harness.submit("a", [1, 2], 3, logprobs=2)
            harness.submit("b", [1, 2], 3)
            for item in harness.wait("a"):
                assert [each.token_id for each in item.logprobs] == list(item.token_ids)
                assert item.logprobs[0].top[0][0] == item.token_ids[0]
            assert all(item.logprobs == () for item in harness.wait("b"))


class TestManyRequests:
    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("chunk", [0, 7])
    def test_a_pool_so_small_that_some_are_preempted(self, chunk):
        prompts = {f"r{number}": prompt_of(6 + number, number) for number in range(16)}
        with Harness(num_blocks=14, prefill_chunk_tokens=chunk) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 18)
            for name, prompt in prompts.items():
                assert harness.tokens(name) == answer(prompt, 18), name
            assert sum(step.preemptions for step in harness.recorder.steps) > 0
            assert sum(usage.preemptions for _, usage in harness.recorder.finished) == sum(
                step.preemptions for step in harness.recorder.steps
            )

    def test_forked_choices_under_preemption(self):
        prompts = {f"r{number}": prompt_of(6 + number, number) for number in range(6)}
        with Harness(num_blocks=16) as harness:
            for name, prompt in prompts.items():
                harness.submit(name, prompt, 16, sampling=DRAWN, num_choices=3)
            for name, prompt in prompts.items():
                for choice in range(3):
                    assert harness.tokens(name, choice) == answer(prompt, 16, DRAWN, seed=11 + choice)
            assert sum(step.preemptions for step in harness.recorder.steps) > 0

    def test_no_more_run_than_may(self):
        with Harness(max_sequences=3) as harness:
            for number in range(10):
                harness.submit(str(number), [number], 6)
            for number in range(10):
                assert harness.tokens(str(number)) == answer([number], 6)
            assert max(len(step) for step in harness.executor.steps) == 3

    def test_each_running_sequence_advances_in_each_step(self):
        with Harness(max_batched_tokens=4) as harness:
            for number in range(8):
                harness.submit(str(number), prompt_of(6, number), 10)
            for number in range(8):
                assert harness.tokens(str(number)) == answer(prompt_of(6, number), 10)
            assert max(sum(step) for step in harness.executor.steps) <= 4

    def test_what_is_told_sums_up(self):
        with Harness() as harness:
            for number in range(5):
                harness.submit(str(number), prompt_of(9, number), 7)
                harness.wait(str(number))
            recorder = harness.recorder
            assert sum(step.generated_tokens for step in recorder.steps) == 35
            assert sum(step.prefill_tokens for step in recorder.steps) == 45
            assert (recorder.first_tokens, recorder.next_tokens) == (5, 30)
            assert [reason for reason, _ in recorder.finished] == [FinishReason.LENGTH] * 5


class TestAbort:
    def test_while_it_runs(self):
        with Harness() as harness:
            harness.submit("a", [1], None)
            harness.wait_for("a", 3)
            assert harness.engine.abort(["a", "b"]) == (1, 1)
            last = harness.last("a")
            assert last.finish_reason is FinishReason.ABORT
            assert last.usage.output_tokens == len(harness.tokens("a"))

    def test_all_choices(self):
        with Harness() as harness:
            harness.submit("a", [1], None, num_choices=3, sampling=DRAWN)
            harness.wait_for("a", 5)
            harness.engine.abort(["a"])
            harness.wait("a")
            assert sum(item.finish_reason is FinishReason.ABORT for item in harness.wait("a")) == 3

    def test_at_random_moments_nothing_leaks(self):
        rng = random.Random(4)
        with Harness(num_blocks=30, max_sequences=8, max_queued=10_000) as harness:
            names = []
            for number in range(500):
                name = f"r{number}"
                harness.submit(
                    name, prompt_of(rng.randint(1, 30), number), rng.randint(1, 20), num_choices=rng.choice([1, 1, 2])
                )
                names.append(name)
                if rng.random() < 1 / 3:
                    victim = rng.choice(names[-8:])
                    threading.Timer(rng.random() / 50, harness.engine.abort, [[victim]]).start()
            for name in names:
                assert harness.last(name).finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
            assert any(harness.last(name).finish_reason is FinishReason.ABORT for name in names)

    def test_a_late_cancel_does_not_touch_the_next_request_of_the_same_id(self):
        with Harness() as harness:
            harness.executor.before_step[0] = lambda: harness.engine.abort(["a"])
            harness.submit("a", [1], 1)
            first = harness.last("a")
            assert first.finish_reason is FinishReason.LENGTH
            harness.forget("a")
            harness.submit("a", [1], 5)
            assert harness.tokens("a") == answer([1], 5)

    def test_duplicate_ids_are_aborted_once(self):
        with Harness() as harness:
            harness.submit("a", [1], None)
            harness.wait_for("a", 1)
            assert harness.engine.abort(["a", "a", "b", "b"]) == (1, 1)
            harness.wait("a")

    def test_who_leaves_the_line_holds_nobody_up(self):
        with Harness(num_blocks=17) as harness:
            harness.submit("running", prompt_of(20), None)
            harness.wait_for("running", 1)
            harness.submit("large", prompt_of(60, 1), 1)
            harness.submit("small", prompt_of(4, 2), 1)
            harness.engine.abort(["large"])
            assert harness.tokens("small") == answer(prompt_of(4, 2), 1)
            harness.engine.abort(["running"])
            assert harness.last("running").usage.output_tokens > 1


class TestRefusals:
    def test_an_id_that_is_live(self):
        with Harness() as harness:
            harness.submit("a", [1], None)
            with pytest.raises(DuplicateRequest, match="'a'"):
                harness.submit("a", [1])
            harness.engine.abort(["a"])
            harness.wait("a")
            harness.submit("b", [1])
            harness.wait("b")

    def test_a_full_queue(self):
        with Harness(max_queued=2, max_sequences=1) as harness:
            harness.submit("running", [1], None)
            harness.wait_for("running", 1)
            harness.submit("a", [1])
            harness.submit("b", [1])
            with pytest.raises(QueueFull, match="2 requests wait already"):
                harness.submit("c", [1])
            assert harness.engine.counts() == (1, 2)
            harness.engine.abort(["running"])
            assert harness.tokens("b") == answer([1], 8)

    def test_after_the_end(self):
        harness = Harness()
        with harness:
            pass
        with pytest.raises(EngineStopped):
            harness.submit("a", [1])
        assert harness.states[-1] is EngineState.STOPPED

    def test_stopping_ends_what_runs(self):
        harness = Harness()
        harness.engine.start()
        harness.submit("a", [1], None)
        got = len(harness.wait_for("a", 2))
        harness.engine.stop()
        failure = harness.wait("a")[-1]
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.STOPPING
        assert int(failure.sentence.split()[4]) >= got

    def test_a_sequence_that_somebody_else_has_at_the_books(self):
        with Harness() as harness:
            harness.submit("a", [1])
            harness.wait("a")
            harness.pool.allocate("b/0", [1])
            harness.submit("b", [1])
            harness.submit("c", [1])
            failure = harness.wait("b")[-1]
            assert isinstance(failure, Failure)
            assert failure.kind is FailureKind.NAME_TAKEN
            assert harness.tokens("c") == answer([1], 8)
            assert harness.pool.occupancy().sequences == 1
            harness.manager.pool("default").free([Append("b/0")])


def run_out_of_memory():
    raise MemoryError("planted")


class TestFaults:
    def test_a_failing_step_fails_its_requests_and_no_others(self):
        with Harness() as harness:
            harness.executor.before_step[0] = run_out_of_memory
            harness.submit("a", [1])
            failure = harness.wait("a")[-1]
            assert isinstance(failure, Failure)
            assert "MemoryError" in failure.sentence
            harness.submit("b", [1])
            assert harness.tokens("b") == answer([1], 8)
            assert [reason for reason, _ in harness.recorder.finished] == [None, FinishReason.LENGTH]

    def test_a_kv_manager_that_comes_late(self):
        books = UnreliableBooks(KvManager("boot"))
        books.down = True
        with Harness(books=books, manager=books.manager) as harness:
            harness.submit("a", [1, 2, 3])
            harness.submit("gone", [1, 2, 3])
            harness.engine.abort(["gone"])
            assert harness.last("gone").finish_reason is FinishReason.ABORT
            books.down = False
            assert harness.tokens("a") == answer([1, 2, 3], 8)
            assert harness.states == [EngineState.SERVING]

    @pytest.mark.parametrize("seed", range(6))
    def test_verbs_that_fail_at_random(self, seed, monkeypatch):
        monkeypatch.setattr("model_runner.engine.RETRY_SECONDS", 0.001)
        books = UnreliableBooks(KvManager("boot"), random.Random(seed), 0.15)
        prompts = {f"r{number}": prompt_of(4 + number, number) for number in range(10)}
        with Harness(num_blocks=24, books=books, manager=books.manager) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                harness.submit(name, prompt, 12, sampling=DRAWN, num_choices=1 + number % 3)
            for number, (name, prompt) in enumerate(prompts.items()):
                for choice in range(1 + number % 3):
                    assert harness.tokens(name, choice) == answer(prompt, 12, DRAWN, seed=11 + choice)
            assert books.failures > 0
            # What ended while the books were away is given back when they are reached again.
            books.rate = 0.0
            harness.submit("last", [1], 1)
            harness.wait("last")

    def test_books_that_are_lost_while_nothing_happens(self, monkeypatch):
        monkeypatch.setattr("model_runner.engine.HEARTBEAT_SECONDS", 0.01)
        books = UnreliableBooks(KvManager("boot"))
        with Harness(books=books, manager=books.manager) as harness:
            harness.wait_for_states(EngineState.SERVING)
            books.down = True
            harness.wait_for_states(EngineState.SERVING, EngineState.WAITING_FOR_BOOKS)
            books.restart()
            books.down = False
            harness.wait_for_states(EngineState.SERVING, EngineState.WAITING_FOR_BOOKS, EngineState.SERVING)
            harness.manager = books.manager
            assert harness.pool.occupancy().free_blocks == 64

    def test_books_that_start_anew(self):
        books = UnreliableBooks(KvManager("boot"))
        prompt = prompt_of(9)
        with Harness(books=books, manager=books.manager) as harness:
            harness.executor.before_step[5] = books.restart
            harness.submit("a", prompt, 40)
            assert harness.tokens("a") == answer(prompt, 40)
            harness.manager = books.manager

    def test_a_pool_taken_by_another_runner_is_not_taken_back(self, monkeypatch):
        # Or an idle engine could see it before the late request is there.
        monkeypatch.setattr("model_runner.engine.HEARTBEAT_SECONDS", 60)
        with Harness() as second:
            first = Harness(manager=second.manager)
            second.submit("before", [1], None)
            second.wait_for("before", 2)
            first.engine.start()
            first.submit("a", [1, 2], None)
            first.wait_for("a", 2)
            failure = second.wait("before")[-1]
            assert isinstance(failure, Failure)
            assert failure.kind is FailureKind.ELSEWHERE
            assert second.states == [EngineState.SERVING, EngineState.TAKEN, EngineState.STOPPED]
            with pytest.raises(EngineStopped):
                second.submit("later", [1])
            first.engine.abort(["a"])
            assert first.last("a").finish_reason is FinishReason.ABORT
            first.assert_nothing_held()
        first.engine.stop()

    def test_a_pool_of_other_facts_is_told(self):
        manager = KvManager("boot")
        manager.open_pool("default", PoolSpec(7, 8), "other")
        harness = Harness(manager=manager)
        harness.engine.start()
        harness.submit("a", [1])
        harness.engine.stop()
        assert harness.states == [EngineState.REFUSED, EngineState.STOPPED]


class UnreliableBooks(InProcessBooks):
    """Books whose verbs fail, before or after they were carried out, as an answer that is lost on the way would."""

    def __init__(self, manager, rng=None, rate=0.0):
        super().__init__(manager)
        self.manager = manager
        self.rng = rng or random.Random(0)
        self.rate = rate
        self.down = False
        self.failures = 0
        self.failed_verbs = set()

    def restart(self):
        """A new process: it knows nothing of what was."""
        self.manager = KvManager("another boot")
        fresh = InProcessBooks(self.manager)
        self.__dict__.update({key: value for key, value in fresh.__dict__.items() if key != "manager"})

    def _maybe(self, verb, *args, **kwargs):
        lost = self.down or self.rng.random() < self.rate
        if lost:
            self.failed_verbs.add(verb.__name__)
        if lost and (self.down or self.rng.random() < 0.5):
            self.failures += 1
            raise BooksUnreachable("planted: not carried out")
        result = verb(*args, **kwargs)
        if lost:
            self.failures += 1
            raise BooksUnreachable("planted: carried out")
        return result

    def open(self, facts):
        return self._maybe(super().open, facts)

    def allocate(self, *args, **kwargs):
        return self._maybe(super().allocate, *args, **kwargs)

    def append(self, updates):
        return self._maybe(super().append, updates)

    def extend(self, updates):
        return self._maybe(super().extend, updates)

    def truncate(self, *args):
        return self._maybe(super().truncate, *args)

    def fork(self, *args):
        return self._maybe(super().fork, *args)

    def free(self, updates, *, preempted=False):
        return self._maybe(super().free, updates, preempted=preempted)

    def flush(self):
        return self._maybe(super().flush)


def test_the_port_tells_losses_apart():
    """What the engine catches together, it must be able to catch: three unrelated exceptions."""
    kinds = BOOKS_TROUBLE
    assert all(not issubclass(one, other) for one in kinds for other in kinds if one is not other)
