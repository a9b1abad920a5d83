"""A KV manager that dies, stops or never answers while streams run, and a runner that dies: real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from services.client import OctavoError
from services.soak.stack import deaf_sockets
from tests.e2e.stack import NOT_SERVING, SERVING, Stack, assert_kill, golden_items, health_of, running_stack, wait_until

ITEMS = [item for item in golden_items() if min(item["gaps"]) > 0.01][:8]
"""Golden outputs that no rounding changes: any run must give exactly these tokens."""
FIRST_TOKENS = 4
TOKENS = 48
BLOCK_SIZE = 16


class Streams:
    """Golden requests that run at the same time."""

    def __init__(self, stack: Stack, threads: ThreadPoolExecutor) -> None:
        self._stack = stack
        self._begun = [0] * len(ITEMS)
        self._ends: list[Future[list[int]]] = [threads.submit(self._run, number) for number in range(len(ITEMS))]

    def until_begun(self) -> None:
        """Until each has some tokens."""
        wait_until("the first tokens", lambda: min(self._begun) >= FIRST_TOKENS, self._stack.runner)

    def tokens_so_far(self) -> int:
        return sum(self._begun)

    def are_stuck(self) -> bool:
        """Whether each has ended, or its blocks are full of what was computed: all its tokens but the last."""
        lengths = [len(item["prompt_token_ids"]) for item in ITEMS]
        return all(
            tokens == TOKENS or (tokens and (length + tokens - 1) % BLOCK_SIZE == 0)
            for length, tokens in zip(lengths, self._begun, strict=True)
        )

    def assert_golden(self) -> None:
        assert [end.result(300) for end in self._ends] == [item["output_ids"] for item in ITEMS]

    def failures(self) -> list[str]:
        """The codes that the streams ended with."""
        errors = [end.exception(300) for end in self._ends]
        return [error.code for error in errors if isinstance(error, OctavoError)]

    def _run(self, number: int) -> list[int]:
        tokens: list[int] = []
        with self._stack.client() as client:
            for chunk in client.generate(ITEMS[number]["prompt_token_ids"], max_tokens=TOKENS, ignore_eos=True):
                tokens += chunk.token_ids
                self._begun[number] = len(tokens)
        return tokens


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("session"), "--num-blocks", "200") as stack:
        yield stack


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(ITEMS)) as threads:
        yield threads


def until_serving(stack: Stack) -> None:
    wait_until("serving", lambda: health_of(stack.runner_address) == SERVING, stack.runner)


def cached_tokens(stack: Stack, prompt: list[int]) -> int:
    """What a prompt hits."""
    with stack.client() as client:
        usage = list(client.generate(prompt, max_tokens=1))[-1].usage
    assert usage is not None
    return usage.cached_tokens


def test_a_killed_kv_manager_costs_no_stream_no_token_and_no_hit(stack: Stack, threads: ThreadPoolExecutor) -> None:
    asked = ITEMS[0]["prompt_token_ids"] + ITEMS[0]["output_ids"]
    with stack.client() as client:
        list(client.generate(asked, max_tokens=1))
    hits = (len(asked) - 1) // 16 * 16
    assert cached_tokens(stack, asked) == hits
    computed = stack.runner_samples()["octavo_runner_prefill_tokens_total"]

    streams = Streams(stack, threads)
    streams.until_begun()
    manager = stack.manager
    assert manager is not None
    assert_kill(manager)
    wait_until("the loss", lambda: health_of(stack.runner_address) == NOT_SERVING, stack.runner)
    samples = stack.runner_samples()
    assert samples['octavo_kv_session{state="up"}'] == 0
    assert samples["octavo_kv_session_away_seconds"] > 0
    stack.start_manager()
    streams.assert_golden()
    until_serving(stack)

    samples = stack.runner_samples()
    assert samples["octavo_kv_session_restores_total"] == 1
    assert samples['octavo_kv_session{state="up"}'] == 1
    assert stack.kv_samples()['octavo_kv_pool_session{pool="default",state="connected"}'] == 1
    assert health_of(stack.kv_address, "session/default") == SERVING
    # Nobody's tokens were computed twice: only the prompts were, as far as they were not cached.
    prompts = sum(len(item["prompt_token_ids"]) for item in ITEMS)
    assert samples["octavo_runner_prefill_tokens_total"] - computed <= prompts
    assert samples["octavo_runner_preemptions_total"] == 0
    assert cached_tokens(stack, asked) == hits
    stack.assert_nothing_held()


def test_a_kv_manager_that_is_stopped_for_ten_seconds_costs_nothing(stack: Stack, threads: ThreadPoolExecutor) -> None:
    streams = Streams(stack, threads)
    streams.until_begun()
    manager = stack.manager
    assert manager is not None
    manager.signal(signal.SIGSTOP)
    time.sleep(10)  # the fault itself: as long as the silence that ends a session
    manager.signal(signal.SIGCONT)
    streams.assert_golden()
    until_serving(stack)
    stack.assert_nothing_held()


def test_a_socket_that_never_answers_holds_nobody_up(stack: Stack, threads: ThreadPoolExecutor) -> None:
    streams = Streams(stack, threads)
    streams.until_begun()
    assert stack.manager is not None
    assert_kill(stack.manager)
    with deaf_sockets(stack.directory / "kv.sock"):
        wait_until("the loss", lambda: health_of(stack.runner_address) == NOT_SERVING, stack.runner)
        before = streams.tokens_so_far()
        # The lease is at hand: streams go on, or have come to their ends.
        wait_until("tokens", lambda: streams.tokens_so_far() > before or before == TOKENS * len(ITEMS), stack.runner)
    stack.start_manager()
    streams.assert_golden()
    until_serving(stack)
    stack.assert_nothing_held()


def test_streams_wait_when_the_lease_is_used_up_and_then_go_on(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    with running_stack(tmp_path, "--num-blocks", "200", "--lease-blocks", "2") as stack:
        streams = Streams(stack, threads)
        streams.until_begun()
        assert stack.manager is not None
        assert_kill(stack.manager)
        wait_until("a used up lease", lambda: stack.runner_samples()["octavo_kv_lease_blocks"] == 0, stack.runner)
        wait_until("streams that wait", streams.are_stuck, stack.runner)
        # All but two of eight need two blocks more, at least.
        assert streams.tokens_so_far() < TOKENS * len(ITEMS)
        assert stack.runner_samples()['octavo_runner_requests{state="running"}'] > 0
        stack.start_manager()
        streams.assert_golden()
        until_serving(stack)
        stack.assert_nothing_held()


def test_a_dead_runner_leaves_a_whole_pool_to_the_next(stack: Stack, threads: ThreadPoolExecutor) -> None:
    ended = 'octavo_kv_sessions_ended_total{cause="stream"}'
    streams = Streams(stack, threads)
    streams.until_begun()
    epoch, before = stack.pool().epoch, stack.kv_samples()[ended]
    assert stack.runner is not None
    assert_kill(stack.runner)
    wait_until("the whole pool", lambda: stack.pool().occupancy.held_blocks == 0)
    # The end of the stream was enough: no silence had to be waited for.
    assert stack.kv_samples()[ended] == before + 1
    assert stack.kv_samples()['octavo_kv_pool_session{pool="default",state="none"}'] == 1
    assert health_of(stack.kv_address, "session/default") == NOT_SERVING
    assert stack.pool().occupancy.sequences == 0
    assert set(streams.failures()) == {"UNAVAILABLE"}
    stack.start_runner()
    until_serving(stack)
    assert stack.pool().epoch == epoch + 1
    Streams(stack, threads).assert_golden()
    stack.assert_nothing_held()
