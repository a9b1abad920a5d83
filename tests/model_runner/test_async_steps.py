"""Steps that are planned while the one before them is in flight: the same answers, and no block comes back too early.

A load is drawn from a seed: prompts that begin alike, choices, searches, penalties, ends of all kinds, a pool that
preempts, aborts and pauses. Its answers are those of the same load with one step at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvmanager import KvManager
from model_runner.books import SequenceUpdate
from model_runner.constraint import Constraint
from model_runner.engine_types import Failure, FailureKind
from model_runner.request import BeamSearch, Chunk, FinishReason, GenerateRequest, SamplingParams, StopConditions
from model_runner.steps import Launched, StepOrder, StepResult, Steps
from services.books_inprocess import InProcessBooks
from tests.model_runner.engine_harness import Harness
from tests.model_runner.step_modes import StepMode, in_mode
from tests.model_runner.test_engine import run_out_of_memory
from tests.model_runner.toy_model import answer

PROMPT = random.Random(1).choices(range(40), k=10)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, seed=11)


class Watch:
    """Which blocks the steps in flight may write, and how many of these there are."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._written: dict[int, set[int]] = {}
        self.most = 0

    def launched(self, order: StepOrder) -> int:
        size = self._block_size
        blocks = {
            entry.block_table[position // size]
            for entry in order.entries
            for position in range(entry.first_position, entry.first_position + len(entry.token_ids))
        }
        self._written[id(order)] = blocks
        self.most = max(self.most, len(self._written))
        return id(order)

    def landed(self, key: int) -> None:
        self._written.pop(key, None)

    @property
    def blocks(self) -> set[int]:
        return set().union(*self._written.values())


class WatchedSteps:
    """Steps in flight are known to a watch until somebody has waited for them."""

    def __init__(self, steps: Steps, watch: Watch) -> None:
        self._steps = steps
        self._watch = watch

    def launch(self, order: StepOrder, before: _Watched | None) -> Launched:
        inner = None if before is None else before.launched
        return _Watched(self._steps.launch(order, inner), order, self._watch)

    def close(self) -> None:
        self._steps.close()


class _Watched:
    def __init__(self, launched: Launched, order: StepOrder, watch: Watch) -> None:
        self.launched = launched
        self._order = order
        self._watch = watch
        watch.launched(order)

    def wait(self) -> StepResult:
        try:
            return self.launched.wait()
        finally:
            self._watch.landed(id(self._order))


class WatchedBooks(InProcessBooks):
    """Takes no block back that a step in flight may write."""

    def __init__(self, manager: KvManager, watch: Watch) -> None:
        super().__init__(manager)
        self._watch = watch

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        live = self._pool().live
        for update in updates:
            if update.sequence_id in live:
                early = self._watch.blocks & set(live[update.sequence_id].blocks)
                assert not early, f"{update.sequence_id} gives back blocks {early}, which a step in flight writes"
        super().free(updates, preempted=preempted)


class Turned(Harness):
    """An engine whose turns the test takes, in its own thread."""

    def __init__(self, mode: StepMode, block_size: int = 4, steps: Steps | None = None, **options: Any) -> None:
        """steps: instead of those of the mode."""
        watch = Watch(block_size)
        manager = KvManager("boot")
        with in_mode(mode):
            super().__init__(block_size=block_size, manager=manager, books=WatchedBooks(manager, watch), **options)
        self.watch = watch
        # Nothing can come while the only thread sleeps.
        self.engine._patience = lambda: 0.0
        self.engine._steps = self.engine._flights._steps = WatchedSteps(steps or mode.steps(self.executor), watch)

    def __enter__(self) -> Turned:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.assert_nothing_held()
        self.engine._shut_down()

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            if self.engine._scheduler.running or self.engine._scheduler.waiting or self.engine._intake.all():
                self.engine._turn()

    def until_idle(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.engine.requests():
                return
            self.engine._turn()
        raise AssertionError("the load does not end")

    def items(self, name: str) -> list[Chunk | Failure]:
        return self._items[name]


@dataclass
class Load:
    """Requests, each with the turn in which it comes, and what becomes of some: by name and number of items.

    forms: by name, of those that have one.
    """

    requests: list[tuple[int, GenerateRequest]]
    aborts: dict[str, int] = field(default_factory=dict)
    pauses: dict[str, int] = field(default_factory=dict)
    forms: dict[str, Constraint] = field(default_factory=dict)


def drawn_load(seed: int, count: int = 14) -> Load:
    """In every second one some requests need their draws before the next step: none runs ahead beside them."""
    rng = random.Random(seed)
    stems = [rng.choices(range(40), k=rng.choice([4, 8, 11])) for _ in range(3)]
    load = Load([])
    turn = 0
    for number in range(count):
        name = f"r{number}"
        turn += rng.choice([0, 0, 1, 3])
        load.requests.append((turn, _drawn_request(rng, name, rng.choice(stems), seed % 2 == 1)))
        if rng.random() < 0.2:
            load.aborts[name] = rng.randint(0, 6)
        elif rng.random() < 0.15:
            load.pauses[name] = rng.randint(0, 6)
    return load


def _drawn_request(rng: random.Random, name: str, stem: list[int], any_kind: bool) -> GenerateRequest:
    special = any_kind and rng.random() < 0.3
    prompt = tuple(stem + rng.choices(range(40), k=rng.randint(0, 9)))
    stop = StopConditions(
        max_tokens=rng.choice([1, 2, 9, 17, 24, 30]),
        stop_strings=rng.choice([(), (), ("ab", "C"), ("zz", "Q", "x")]),
        stop_token_ids=frozenset(rng.choices(range(40), k=rng.choice([0, 0, 1, 2]))),
        ignore_eos=rng.random() < 0.6,
        min_tokens=rng.choice([0, 2]) if special else 0,
    )
    if special and rng.random() < 0.3:
        return GenerateRequest(name, prompt, SamplingParams(), stop, num_choices=1, beam_search=BeamSearch(2))
    penalty = rng.choice([0.0, 0.5]) if special else 0.0
    temperature = rng.choice([0.0, 0.8, 1.2])
    sampling = SamplingParams(
        temperature=temperature, top_p=rng.choice([1.0, 0.9]), seed=rng.randrange(1000), presence_penalty=penalty
    )
    choices = rng.choice([1, 1, 1, 3])
    return GenerateRequest(
        name,
        prompt,
        sampling,
        stop,
        num_choices=choices,
        logprobs=rng.choice([None, None, 0, 3]),
        prompt_logprobs=rng.choice([None, 1]) if special else None,
    )


def play(load: Load, mode: StepMode, **options: Any) -> Turned:
    """The load, played to its end."""
    due, aborts = list(load.requests), dict(load.aborts)
    lives = {}
    paused: dict[str, int] = {}
    with Turned(mode, eos=[3, 7], **options) as turned:
        turn = 0
        while due or turned.engine.requests():
            while due and due[0][0] <= turn:
                request = due.pop(0)[1]
                lives[request.request_id] = turned.engine.submit(request, load.forms.get(request.request_id))
            for name in [each for each in aborts if each in lives and len(turned.items(each)) >= aborts[each]]:
                turned.engine.cancel(lives[name])
                del aborts[name]
            for name, count in load.pauses.items():
                if name in lives and name not in paused and len(turned.items(name)) >= count:
                    turned.engine.throttle(lives[name], True)
                    paused[name] = turn
                if turn == paused.get(name, -9) + 5:
                    turned.engine.throttle(lives[name], False)
            turned.engine._turn()
            turn += 1
            assert turn < 5000, "the load does not end"
    return turned


def told(turned: Turned, name: str) -> dict[int, tuple]:
    """By choice what a client got, however it was cut into chunks."""
    choices: dict[int, list[Chunk]] = {}
    for item in turned.items(name):
        assert isinstance(item, Chunk), item
        choices.setdefault(item.choice_index, []).append(item)
    return {
        index: (
            [token for chunk in chunks for token in chunk.token_ids],
            "".join(chunk.text for chunk in chunks),
            [position for chunk in chunks for position in chunk.logprobs],
            chunks[-1].finish_reason,
            chunks[-1].stop_token_id,
            chunks[-1].stop_string,
            chunks[-1].score,
            [position for chunk in chunks for position in chunk.prompt_logprobs],
        )
        for index, chunks in choices.items()
    }


SMALL = {"num_blocks": 20, "max_sequences": 6, "max_batched_tokens": 24}


@pytest.mark.usefixtures("no_foresight")
@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_load(seed: int) -> None:
    load = drawn_load(seed)
    one_by_one = play(load, StepMode.SYNC, **SMALL)
    assert one_by_one.watch.most == 1
    mode = StepMode.WORKER if seed % 3 == 2 else StepMode.AHEAD
    ahead = play(load, mode, **SMALL)
    if not seed % 2:
        assert ahead.watch.most == 2
    assert_told_alike(load, one_by_one, ahead)


def assert_told_alike(load: Load, one_by_one: Turned, ahead: Turned) -> None:
    """Clients and operators are told the same, whenever they are."""
    for _, request in load.requests:
        name = request.request_id
        expected, got = told(one_by_one, name), told(ahead, name)
        if name in load.aborts:
            assert_begins_alike(expected, got)
            continue
        assert got == expected, name
        before, after = one_by_one.items(name)[-1].usage, ahead.items(name)[-1].usage
        for what in ("prompt_tokens", "output_tokens", "drafted_tokens", "accepted_tokens"):
            assert getattr(after, what) == getattr(before, what), (name, what)
    recorder = ahead.recorder
    usages = [usage for _, usage in recorder.finished]
    assert len(usages) == len(load.requests)
    assert sum(usage.output_tokens for usage in usages) == recorder.generated_tokens
    assert sum(step.generated_tokens for step in recorder.steps) == recorder.generated_tokens
    assert sum(usage.preemptions for usage in usages) == recorder.preemptions


def assert_begins_alike(expected: dict[int, tuple], got: dict[int, tuple]) -> None:
    """Of an aborted request: it may have come some tokens further, or less far."""
    for index in expected.keys() & got.keys():
        one, other = expected[index][0], got[index][0]
        assert one[: len(other)] == other[: len(one)]


def test_the_drawn_loads_show_something() -> None:
    """Some preempt, some stop by a token or string, some abort."""
    played = [play(drawn_load(seed), StepMode.AHEAD, **SMALL) for seed in range(6)]
    ends = [reason for each in played for reason, _ in each.recorder.finished]
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} <= set(ends)
    assert sum(each.recorder.preemptions for each in played) > 3


class TestInVain:
    """The toy's answer to PROMPT; what is computed behind its end."""

    def computed(self, mode: StepMode, **options) -> Turned:
        with Turned(mode) as turned:
            turned.submit("a", PROMPT, **options)
            turned.until_idle()
            self.cached_blocks = turned.pool.occupancy().cached_blocks
        return turned

    @pytest.mark.parametrize("mode", StepMode)
    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_nothing_behind_a_certain_end(self, mode: StepMode, count: int) -> None:
        turned = self.computed(mode, max_tokens=count)
        assert turned.tokens("a") == answer(PROMPT, count)
        assert turned.executor.computed_tokens == len(PROMPT) + count - 1

    @pytest.mark.parametrize("mode", StepMode)
    def test_nothing_behind_the_longest_sequence(self, mode: StepMode) -> None:
        with Turned(mode, max_model_tokens=20) as turned:
            turned.submit("a", PROMPT, None)
            turned.until_idle()
        assert turned.tokens("a") == answer(PROMPT, 11)
        assert turned.executor.computed_tokens == 20

    @pytest.mark.parametrize("mode", StepMode)
    def test_one_token_behind_an_end_that_comes_unawares(self, mode: StepMode) -> None:
        tokens = answer(PROMPT, 12)
        last = next(place for place in range(3, 12) if tokens.index(tokens[place]) == place)
        turned = self.computed(mode, max_tokens=30, stop_token_ids=[tokens[last]])
        assert turned.tokens("a") == tokens[: last + 1]
        assert turned.last("a").finish_reason is FinishReason.STOP
        assert turned.executor.computed_tokens == len(PROMPT) + last + mode.is_async
        # What was computed in vain is not in the cache: the last token has no K/V, as ever.
        assert self.cached_blocks == (len(PROMPT) + last) // 4


def test_a_prompt_that_fills_its_blocks_sits_one_step_out() -> None:
    """It has promised them, and may not ask for the next one before they are computed."""
    with Turned(StepMode.AHEAD) as turned:
        turned.submit("a", PROMPT[:8], 4)
        turned.submit("b", PROMPT[::-1][:7], 4)
        turned.until_idle()
    assert turned.tokens("a") == answer(PROMPT[:8], 4)
    assert turned.tokens("b") == answer(PROMPT[::-1][:7], 4)
    assert turned.executor.steps == [[8, 7], [1], [1, 1], [1, 1], [1]]


@pytest.mark.parametrize("mode", [StepMode.AHEAD, StepMode.WORKER])
def test_a_step_that_fails_ends_its_requests_and_what_ended_before_is_told(mode: StepMode) -> None:
    """The first request has its last token in the step before the one that fails."""
    with Turned(mode) as turned:
        turned.submit("ended", PROMPT, 3)
        turned.submit("fails", PROMPT[::-1], 9)
        turned.executor.before_step[3] = run_out_of_memory
        turned.until_idle()
        assert turned.tokens("ended") == answer(PROMPT, 3)
        *chunks, failure = turned.items("fails")
        assert isinstance(failure, Failure)
        assert failure.kind is FailureKind.ENGINE
        assert [token for chunk in chunks for token in chunk.token_ids] == answer(PROMPT[::-1], 3)
        turned.submit("after", PROMPT, 5)
        turned.until_idle()
        assert turned.tokens("after") == answer(PROMPT, 5)
