"""The engine's load as a gateway is told it: counted over the last seconds, and told when it changes or time passes."""

from __future__ import annotations

import pytest

from model_runner.observer import PhaseSeconds, StepReport
from model_runner.request import FinishReason, RequestView, Usage
from services.load_meter import LoadMeter, Observers
from tests.gateway.needed import need

need("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2 as pb  # noqa: E402

from services.vllm_events import LoadStamps, engine_load, load_differs  # noqa: E402

STEP = StepReport(PhaseSeconds(0, 0, 0, 0, 0), prefill_tokens=0, generated_tokens=1, preemptions=0, sequences=1)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def usage(prompt_tokens: int, cached_tokens: int) -> Usage:
    return Usage(prompt_tokens, cached_tokens, 1, 0, 0.0, 0.0, 0.0)


def view(*, running: bool, prompt_tokens: int = 100, age: float = 60.0) -> RequestView:
    return RequestView("r", running, prompt_tokens, 0, age, ())


def test_tokens_per_second_are_those_of_the_last_two() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    meter.on_progress(10, 0)
    clock.now += 1.5
    meter.on_progress(6, 0)
    assert meter.tokens_per_second() == 8.0
    clock.now += 1.0
    assert meter.tokens_per_second() == 3.0
    clock.now += 10.0
    assert meter.tokens_per_second() == 0.0


def test_the_hit_rate_is_of_tokens_and_of_the_last_64() -> None:
    meter = LoadMeter(Clock())
    assert meter.hit_rate() == 0.0
    meter.on_finish(FinishReason.STOP, usage(100, 0), "")
    meter.on_finish(None, usage(300, 300), "")
    assert meter.hit_rate() == 0.75
    for _ in range(64):
        meter.on_finish(FinishReason.STOP, usage(10, 1), "")
    assert meter.hit_rate() == pytest.approx(0.1)


def test_the_load_of_a_moment() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    meter.on_finish(FinishReason.STOP, usage(100, 25), "")
    meter.on_step(STEP)
    clock.now += 3.0
    views = [view(running=True), view(running=False, prompt_tokens=200), view(running=False, prompt_tokens=40)]
    load = meter.measure(views, held_blocks=30, usable_blocks=120, block_size=16)
    assert (load.running, load.waiting) == (1, 2)
    # 240 tokens of which a quarter may be cached.
    assert load.waiting_tokens == 180
    assert (load.held_share, load.held_tokens, load.capacity_tokens) == (0.25, 480, 1920)
    assert load.silent_seconds == 3.0


def test_an_engine_that_was_idle_is_not_silent() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    clock.now += 500.0
    assert meter.measure([view(running=True, age=0.5)], 0, 1, 16).silent_seconds == 0.5
    assert meter.measure([view(running=False)], 0, 1, 16).silent_seconds is None
    assert meter.measure([], 0, 1, 16).silent_seconds is None


def test_all_observers_are_told_everything() -> None:
    told: list[tuple[int, str]] = []

    class Listener:
        def __init__(self, number: int) -> None:
            self.number = number

        def __getattr__(self, name: str):
            return lambda *arguments: told.append((self.number, name))

    both = Observers(Listener(1), Listener(2))
    both.on_step(STEP)
    both.on_progress(1, 0)
    both.on_first_token(0.1)
    both.on_next_token(0.1)
    both.on_finish(None, usage(1, 0), "t")
    names = ["on_step", "on_progress", "on_first_token", "on_next_token", "on_finish"]
    assert told == [(number, name) for name in names for number in (1, 2)]


def test_silence_is_told_in_milliseconds_and_only_while_requests_run() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    clock.now += 1.25
    busy = engine_load(meter.measure([view(running=True)], 1, 4, 16), 8)
    idle = engine_load(meter.measure([], 1, 4, 16), 8)
    assert busy.engine_silence_ms == 1250
    assert not idle.HasField("engine_silence_ms")
    assert (idle.max_running_requests, idle.engine_reports_steps) == (8, True)


def test_loads_are_told_when_they_change_and_else_after_a_second_and_after_five_when_idle() -> None:
    clock, load = Clock(), pb.EngineLoad()
    stamps = LoadStamps(lambda: load, clock)
    first = stamps.stamp(pb.KvEventBatch(sequence_number=5))
    assert (first.load.sample, first.load.load_only) == (1, False)
    assert stamps.due(5) is None
    load = pb.EngineLoad(running_requests=1)
    changed = stamps.due(5)
    assert (changed.sequence_number, changed.load.running_requests, changed.load.load_only) == (5, 1, True)
    for seconds in (1.0, 1.0, 5.0, 5.0):
        clock.now += seconds - 0.01
        assert stamps.due(5) is None
        clock.now += 0.02
        assert stamps.due(5) is not None
    # News end the idleness.
    stamps.stamp(pb.KvEventBatch(sequence_number=6))
    clock.now += 1.01
    assert stamps.due(6).load.sample == 8


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({"waiting_requests": 1}, {"waiting_requests": 2}, True),
        ({"token_usage": 0.5}, {"token_usage": 0.504}, False),
        ({"token_usage": 0.5}, {"token_usage": 0.506}, True),
        ({"gen_throughput": 100.0}, {"gen_throughput": 104.0}, False),
        ({"gen_throughput": 100.0}, {"gen_throughput": 106.0}, True),
        ({"gen_throughput": 10_000.0}, {"gen_throughput": 10_060.0}, True),
        ({"cache_hit_rate": 0.1}, {"cache_hit_rate": 0.9}, False),
    ],
)
def test_what_counts_as_a_change(before: dict[str, float], now: dict[str, float], differs: bool) -> None:
    assert load_differs(pb.EngineLoad(**before), pb.EngineLoad(**now)) is differs
