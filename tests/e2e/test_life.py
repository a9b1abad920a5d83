"""Requests that end early, a KV manager that comes late or dies, and what is left: nothing."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from model_runner.request import FinishReason
from services.client import Client, OctavoError
from tests.e2e.stack import (
    NOT_SERVING,
    SERVING,
    Stack,
    assert_kill,
    golden_items,
    health_of,
    running_stack,
    wait_until,
)
from tests.e2e.tiny_chat_model import VOCAB_SIZE, write_tiny_chat_model

CLEAR = next(item for item in golden_items() if min(item["gaps"]) > 0.4)
"""A golden output without near ties: any run must give exactly its tokens."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    arguments = ("--num-blocks", "120", "--grace-seconds", "60")
    with running_stack(tmp_path_factory.mktemp("life"), *arguments) as stack:
        yield stack


def golden_tokens(client: Client) -> list[int]:
    chunks = client.generate(CLEAR["prompt_token_ids"], max_tokens=48, ignore_eos=True)
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def test_500_requests_a_third_of_them_cancelled(tmp_path: Path) -> None:
    rng = random.Random(20)
    plans = [
        (
            rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, 60)),
            rng.randint(1, 12),
            rng.random() < 1 / 3,
            rng.random(),
        )
        for _ in range(500)
    ]

    def run(stack: Stack, plan: tuple[list[int], int, bool, float]) -> str:
        prompt, max_tokens, cancelled, moment = plan
        with stack.client() as client:
            # Those that are cancelled ask for more than there is time for on most machines.
            max_tokens *= 20 if cancelled else 1
            stream = client.generate(prompt, max_tokens=max_tokens, ignore_eos=True, n=1 + len(prompt) % 2)
            if not cancelled:
                return "done" if sum(len(chunk.token_ids) for chunk in stream) else "empty"
            # Before the first token, or after some: closing the iterator cancels the RPC.
            timer = threading.Timer(moment * 0.2, client.close)
            timer.start()
            try:
                for _ in stream:
                    pass
            except (OctavoError, ValueError):
                return "cancelled"
            finally:
                timer.cancel()
            return "done"

    model = write_tiny_chat_model(tmp_path / "model")
    with running_stack(tmp_path, "--model", str(model), "--num-blocks", "120") as stack:
        with ThreadPoolExecutor(24) as threads:
            outcomes = list(threads.map(partial(run, stack), plans))
        assert outcomes.count("empty") == 0
        assert outcomes.count("cancelled") > 50
        stack.assert_nothing_held()
        samples = stack.runner_samples()
        assert samples['octavo_runner_requests{state="running"}'] == 0
        assert samples['octavo_runner_requests{state="waiting"}'] == 0
        kv = stack.kv_samples()
        assert kv['octavo_kv_blocks{pool="default",state="held"}'] == samples["octavo_kv_lease_blocks"]
        assert kv['octavo_kv_books_imbalance{pool="default"}'] == 0


def test_abort_by_id_and_the_list_of_requests(stack: Stack) -> None:
    with stack.client() as client:
        stream = client.generate([504, 3562], request_id="long", ignore_eos=True)
        next(stream)
        listed = client.requests()
        assert [(each.request_id, each.prompt_tokens, list(each.sequence_ids)) for each in listed] == [
            ("long", 2, ["long/0"])
        ]
        assert client.abort("long") == (1, 0)
        last = list(stream)[-1]
        assert last.finish_reason is FinishReason.ABORT
        assert last.usage is not None
    stack.assert_nothing_held()


def test_a_deadline_ends_a_request(stack: Stack) -> None:
    with Client(stack.runner_address, timeout=0.5) as client:
        with pytest.raises(OctavoError) as caught:
            list(client.generate([504], ignore_eos=True))
        assert caught.value.code == "DEADLINE_EXCEEDED"
    stack.assert_nothing_held()


def test_the_next_turn_hits_what_was_generated(stack: Stack) -> None:
    stack.reset_cache()
    with stack.client() as client:
        first = CLEAR["prompt_token_ids"] + golden_tokens(client)
        last = list(client.generate([*first, 198], max_tokens=1))[-1]
        assert last.usage is not None
        # The last generated token was never computed: full blocks of what comes before it are cached.
        assert last.usage.cached_tokens == (len(first) - 1) // 16 * 16


def test_a_kv_manager_that_comes_late(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    try:
        runner = stack.start_runner()
        wait_until("the wait", lambda: "waiting for the KV manager" in runner.log, runner)
        assert f"unix:{tmp_path}/kv.sock" in runner.log
        assert health_of(stack.runner_address) == NOT_SERVING
        assert health_of(stack.runner_address, "octavo.runner.v1.ModelRunnerService") == NOT_SERVING
        assert health_of(stack.runner_address, "liveness") == SERVING
        with stack.client() as client:
            with pytest.raises(OctavoError, match="waits for the KV manager at unix:") as caught:
                list(client.generate([504], max_tokens=1))
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "NOT_READY")
            stack.start_manager()
            wait_until("serving", lambda: health_of(stack.runner_address) == SERVING, runner)
            assert golden_tokens(client) == CLEAR["output_ids"]
        stack.assert_nothing_held()
    finally:
        stack.stop()


def test_a_kv_manager_that_is_lost_while_nothing_happens(stack: Stack) -> None:
    assert stack.manager is not None
    assert_kill(stack.manager)
    wait_until("the loss", lambda: health_of(stack.runner_address) == NOT_SERVING, stack.runner)
    stack.start_manager()
    wait_until("serving", lambda: health_of(stack.runner_address) == SERVING, stack.runner)
    stack.assert_nothing_held()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_kv_manager_that_is_lost_while_a_stream_runs(stack: Stack, how: str) -> None:
    manager = stack.manager
    assert manager is not None
    with stack.client() as client:
        stream = client.generate(CLEAR["prompt_token_ids"], max_tokens=48, ignore_eos=True)
        tokens = list(next(stream).token_ids)
        manager.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        wait_until("the loss", lambda: health_of(stack.runner_address) == NOT_SERVING, stack.runner)
        if how == "killed":
            manager.wait()
            stack.start_manager()
        else:
            manager.signal(signal.SIGCONT)
        tokens += [token_id for chunk in stream for token_id in chunk.token_ids]
        assert tokens == CLEAR["output_ids"]
    wait_until("serving", lambda: health_of(stack.runner_address) == SERVING, stack.runner)
    stack.assert_nothing_held()


def test_sigterm_lets_a_stream_finish(stack: Stack) -> None:
    runner = stack.runner
    assert runner is not None
    with stack.client() as client:
        stream = client.generate(CLEAR["prompt_token_ids"], max_tokens=48, ignore_eos=True)
        tokens = list(next(stream).token_ids)
        runner.signal(signal.SIGTERM)
        tokens += [token_id for chunk in stream for token_id in chunk.token_ids]
    assert tokens == CLEAR["output_ids"]
    assert runner.wait() == 0
    wait_until("serving", lambda: health_of(stack.runner_address) == SERVING, stack.start_runner())


def test_a_runner_that_dies_leaves_an_empty_pool_to_the_next(stack: Stack) -> None:
    runner, epoch = stack.runner, stack.pool().epoch
    assert runner is not None
    with stack.client() as client:
        stream = client.generate([504], ignore_eos=True)
        next(stream)
        assert_kill(runner)
        with pytest.raises(OctavoError) as caught:
            list(stream)
        assert caught.value.code == "UNAVAILABLE"
    runner = stack.start_runner()
    wait_until("serving", lambda: health_of(stack.runner_address) == SERVING, runner)
    assert stack.pool().epoch == epoch + 1
    stack.assert_nothing_held()
    with stack.client() as client:
        assert golden_tokens(client) == CLEAR["output_ids"]
