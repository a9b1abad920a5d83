"""A request that leaves, or pauses, at every moment of its life: what it held is back, and the others never notice.

The moments are exact: the toy executor calls the test in the engine's thread before a step of its choice.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest

from kvmanager import KvManager
from model_runner.engine_types import EngineState, Failure, FailureKind, QueueFull
from model_runner.request import FinishReason, SamplingParams
from tests.model_runner.engine_harness import PATIENCE_SECONDS, Harness
from tests.model_runner.step_modes import StepMode, in_mode
from tests.model_runner.test_engine import UnreliableBooks, run_out_of_memory
from tests.model_runner.toy_model import answer

DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
PROMPT = random.Random(1).choices(range(40), k=10)
TOKENS = 6
STEPS = 4 + TOKENS - 1
"""Of PROMPT in chunks of 3, and TOKENS of the answer, alone."""


@pytest.fixture(autouse=True, params=[StepMode.SYNC, StepMode.AHEAD], ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything happens with one step at a time, and with the next one planned while the last is in flight."""
    with in_mode(request.param):
        yield


@pytest.fixture
def harness(mode: None) -> Iterator[Harness]:
    """Beside the request that is looked at another one runs to its end; then nothing is held."""
    with Harness(prefill_chunk_tokens=3) as harness:
        yield harness


def during(harness: Harness, step: int, act: Callable[[], object]) -> None:
    harness.executor.before_step[step] = act


class Guest:
    """The request that is looked at, beside one that runs `longer`; `act` happens during the step of that number."""

    def __init__(self, harness: Harness, step: int, act: Callable[[Guest], object], choices: int, longer: int) -> None:
        self._harness = harness
        self._submitted = threading.Event()
        during(harness, step, lambda: act(self))
        at_first = harness.executor.before_step.pop(0, lambda: None)
        during(harness, 0, lambda: self._begin(longer, at_first))
        self.live = harness.submit("a", PROMPT, TOKENS, num_choices=choices, sampling=DRAWN)
        self._submitted.set()

    def _begin(self, longer: int, at_first: Callable[[], object]) -> None:
        assert self._submitted.wait(PATIENCE_SECONDS)
        self._harness.submit("other", PROMPT[::-1], longer)
        at_first()


class TestCancellation:
    @pytest.mark.parametrize("choices", [1, 3])
    @pytest.mark.parametrize("step", range(STEPS))
    def test_during_each_step(self, harness: Harness, step: int, choices: int) -> None:
        """In prefill, in the step that splits the choices, between chunks, and in the very step that finishes it."""
        Guest(harness, step, lambda guest: harness.engine.cancel(guest.live), choices, 12)
        assert harness.tokens("other") == answer(PROMPT[::-1], 12)
        reasons = [item.finish_reason for item in harness.wait("a") if item.finish_reason]
        ran_out = step == STEPS - 1
        assert reasons == [FinishReason.LENGTH if ran_out else FinishReason.ABORT] * (choices if step >= 3 else 1)
        for choice in range(choices if step >= 3 else 1):
            expected = answer(PROMPT, TOKENS, DRAWN, seed=11 + choice)
            assert harness.tokens("a", choice) == expected[: max(0, step - 2)]

    def test_in_the_queue(self) -> None:
        with Harness(max_sequences=1) as harness:
            harness.submit("running", PROMPT, None)
            harness.wait_for("running", 1)
            live = harness.submit("queued", PROMPT, TOKENS)
            harness.submit("behind", PROMPT, TOKENS)
            harness.engine.cancel(live)
            usage = harness.last("queued").usage
            assert (usage.output_tokens, usage.prefill_seconds, usage.decode_seconds) == (0, 0.0, 0.0)
            assert usage.queue_seconds > 0
            harness.engine.abort(["running"])
            assert harness.tokens("behind") == answer(PROMPT, TOKENS)

    def test_twice_and_after_the_end(self, harness: Harness) -> None:
        live = harness.submit("a", PROMPT, None)
        harness.wait_for("a", 1)
        for _ in range(2):
            harness.engine.cancel(live)
        assert harness.last("a").finish_reason is FinishReason.ABORT
        harness.engine.cancel(live)
        harness.submit("other", PROMPT, TOKENS)
        assert harness.tokens("other") == answer(PROMPT, TOKENS)


class TestPauses:
    @pytest.mark.parametrize("choices", [1, 3])
    @pytest.mark.parametrize("step", range(STEPS - 1))
    def test_during_each_step(self, harness: Harness, step: int, choices: int) -> None:
        """It holds nothing while it pauses, and its answer is the same."""
        held: list[bool] = []

        def go_on(guest: Guest) -> None:
            held.append(guest.live.is_running)
            harness.engine.throttle(guest.live, False)

        def pause(guest: Guest) -> None:
            harness.engine.throttle(guest.live, True)
            during(harness, step + 3, lambda: go_on(guest))

        Guest(harness, step, pause, choices, STEPS + 8)
        for choice in range(choices):
            assert harness.tokens("a", choice) == answer(PROMPT, TOKENS, DRAWN, seed=11 + choice)
        assert harness.tokens("other") == answer(PROMPT[::-1], STEPS + 8)
        assert held == [False]
        usage = harness.last("a").usage
        assert (usage.pauses, usage.preemptions, usage.output_tokens) == (1, 0, TOKENS * choices)

    def test_who_pauses_makes_room(self) -> None:
        """A pool of 16 blocks of 4 tokens: the second prompt fits only when the first gives its blocks back."""
        first, second = PROMPT * 4, PROMPT[::-1] * 3
        with Harness(num_blocks=17) as harness:
            live = harness.submit("first", first, 24)
            harness.wait_for("first", 1)
            harness.submit("second", second, 5)
            harness.engine.throttle(live, True)
            assert harness.tokens("second") == answer(second, 5)
            assert [view.paused for view in harness.engine.requests()] == [True]
            assert harness.pool.occupancy().held_blocks == 0
            harness.engine.throttle(live, False)
            assert harness.tokens("first") == answer(first, 24)

    def test_in_line_after_a_preemption(self) -> None:
        with Harness(max_sequences=1) as harness:
            live = harness.submit("a", PROMPT, 30)
            harness.wait_for("a", 1)
            for paused in (True, False, True, True, False, False):
                harness.engine.throttle(live, paused)
            assert harness.tokens("a") == answer(PROMPT, 30)

    @pytest.mark.parametrize("how", ["abort", "cancel"])
    def test_who_pauses_may_leave(self, harness: Harness, how: str) -> None:
        live = harness.submit("a", PROMPT, None)
        harness.wait_for("a", 1)
        harness.engine.throttle(live, True)
        harness.submit("other", PROMPT, TOKENS)
        assert harness.tokens("other") == answer(PROMPT, TOKENS)
        if how == "abort":
            assert harness.engine.abort(["a"]) == (1, 0)
        else:
            harness.engine.cancel(live)
        assert harness.last("a").finish_reason is FinishReason.ABORT
        # Too late, and of no effect.
        harness.engine.throttle(live, False)
        harness.submit("another", PROMPT, TOKENS)
        assert harness.tokens("another") == answer(PROMPT, TOKENS)

    def test_when_the_books_are_lost_meanwhile(self) -> None:
        books = UnreliableBooks(KvManager("boot"))
        with Harness(books=books, manager=books.manager) as harness:
            live = harness.submit("a", PROMPT, 40)
            harness.wait_for("a", 1)
            harness.engine.throttle(live, True)
            harness.submit("other", PROMPT, 20)
            harness.wait_for("other", 1)
            books.restart()
            assert harness.tokens("other") == answer(PROMPT, 20)
            harness.engine.throttle(live, False)
            assert harness.tokens("a") == answer(PROMPT, 40)
            harness.manager = books.manager

    def test_when_the_books_fail_as_it_gives_its_blocks_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("model_runner.engine.RETRY_SECONDS", 0.001)
        books = UnreliableBooks(KvManager("boot"))
        with Harness(books=books, manager=books.manager) as harness:
            lives = [harness.submit(name, PROMPT, 40) for name in ("a", "b")]

            def fail() -> None:
                books.rate = 1.0
                for live in lives:
                    harness.engine.throttle(live, True)

            harness.wait_for("b", 2)
            during(harness, len(harness.executor.steps) + 3, fail)
            harness.wait_for_states(EngineState.SERVING, EngineState.WAITING_FOR_BOOKS)
            books.rate = 0.0
            for live in lives:
                harness.engine.throttle(live, False)
            for name in ("a", "b"):
                assert harness.tokens(name) == answer(PROMPT, 40)
                assert harness.last(name).usage.pauses == 1

    def test_when_the_server_stops(self) -> None:
        harness = Harness()
        harness.engine.start()
        live = harness.submit("a", PROMPT, None)
        harness.wait_for("a", 1)
        harness.engine.throttle(live, True)
        harness.engine.stop()
        failure = harness.wait("a")[-1]
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.STOPPING
        assert harness.engine.requests() == []


class TestTheQueue:
    def test_too_many_prompt_tokens(self) -> None:
        with Harness(max_sequences=1, max_queued_tokens=25) as harness:
            harness.submit("running", PROMPT, None)
            harness.wait_for("running", 1)
            harness.submit("a", PROMPT)
            harness.submit("b", PROMPT)
            with pytest.raises(QueueFull, match=r"2 requests with 20 prompt tokens wait .* with 6 more .* above 25"):
                harness.submit("c", PROMPT[:6])
            harness.submit("d", PROMPT[:5])
            harness.engine.abort(["running"])
            assert harness.tokens("d") == answer(PROMPT[:5], 8)

    def test_one_prompt_may_always_wait(self) -> None:
        with Harness(max_sequences=1, max_queued_tokens=1) as harness:
            harness.submit("running", PROMPT, None)
            harness.wait_for("running", 1)
            harness.submit("a", PROMPT)
            harness.engine.abort(["running"])
            assert harness.tokens("a") == answer(PROMPT, 8)

    def test_those_that_are_still_on_their_way_count(self) -> None:
        with Harness(max_sequences=1, max_queued=3) as harness:
            harness.submit("running", PROMPT, None)
            harness.wait_for("running", 1)
            harness.submit("a", PROMPT)
            harness.engine.check_room(1)
            with pytest.raises(QueueFull, match="3 requests wait already"):
                harness.engine.check_room(2)
            harness.engine.abort(["running"])
            harness.wait("a")


class TestTheTruth:
    @pytest.mark.usefixtures("no_foresight")
    @pytest.mark.parametrize("seed", range(4))
    def test_usages_sum_up_to_what_is_counted(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """30 requests in a pool that preempts: some are aborted, some fail, and the books fail now and then."""
        monkeypatch.setattr("model_runner.engine.RETRY_SECONDS", 0.001)
        rng = random.Random(seed)
        books = UnreliableBooks(KvManager("boot"), random.Random(seed), 0.02)
        with Harness(num_blocks=20, max_sequences=8, books=books, manager=books.manager) as harness:
            for step in rng.sample(range(5, 60), 3):
                during(harness, step, run_out_of_memory)
            names = [f"r{number}" for number in range(30)]
            for name in names:
                prompt = rng.choices(range(40), k=rng.randint(1, 20))
                harness.submit(name, prompt, rng.randint(1, 24), num_choices=rng.choice([1, 1, 3]), sampling=DRAWN)
                if rng.random() < 0.2:
                    harness.engine.abort([rng.choice(names[:10])])
            ends = [harness.last(name) for name in names]
            recorder = harness.recorder
            usages = [usage for _, usage in recorder.finished]
            assert len(usages) == 30
            assert sum(usage.output_tokens for usage in usages) == recorder.generated_tokens
            assert sum(usage.preemptions for usage in usages) == recorder.preemptions > 0
            assert [reason for reason, _ in recorder.finished].count(None) == sum(
                isinstance(end, Failure) for end in ends
            )
            assert any(isinstance(end, Failure) for end in ends)
            books.rate = 0.0
            harness.submit("last", [1], 1)
            harness.wait("last")

    def test_the_times_of_a_request_add_up(self) -> None:
        with Harness(max_sequences=1) as harness:
            running = harness.submit("running", PROMPT, 5)
            queued = harness.submit("queued", PROMPT, 5)
            for name, live in (("running", running), ("queued", queued)):
                usage = harness.last(name).usage
                total = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
                assert total == pytest.approx(live.last_token_at - live.arrived_at)
                assert min(usage.queue_seconds, usage.prefill_seconds, usage.decode_seconds) > 0
