"""SIGTERM while requests are in progress, on real processes: what runs may finish, what is new goes elsewhere.

A client that does not read holds its request in progress for as long as a test wants.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from services.client import Client, OctavoError, generate_request
from services.client_retry import NO_RETRIES
from services.errors import describe_rpc_error
from services.runner_wire import read_chunk
from tests.e2e.stack import NOT_SERVING, PATIENCE_SECONDS, Process, Stack, health_of, running_stack, wait_until
from tests.e2e.tiny_chat_model import write_tiny_chat_model
from tests.services.silent_client import Silent

PROMPT = list(b"Once upon a time")
TOKENS = 200
SLOW = generate_request(PROMPT, request_id="slow", max_tokens=TOKENS, ignore_eos=True, logprobs=100)


@contextmanager
def held_stack(directory: Path, grace_seconds: float) -> Iterator[tuple[Stack, Silent, list[int]]]:
    """A stack with a request in progress whose client does not read, and the answer that it must get."""
    options = ("--model", str(write_tiny_chat_model(directory / "model")), "--max-unread-tokens", "1")
    with running_stack(directory, *options, "--grace-seconds", str(grace_seconds)) as stack, stack.client() as client:
        expected = tokens_of(client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True))
        assert len(expected) == TOKENS
        with Silent(stack.runner_address, SLOW) as slow:
            wait_until("the pause", lambda: any(not each.sequence_ids for each in client.requests()))
            yield stack, slow, expected


def tokens_of(chunks) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def stopping(stack: Stack) -> bool:
    return health_of(stack.runner_address) == NOT_SERVING


@pytest.mark.parametrize("both", [False, True], ids=["the runner", "both at once"])
def test_what_is_in_progress_finishes_and_what_is_new_is_refused(tmp_path: Path, both: bool) -> None:
    with held_stack(tmp_path, 600) as (stack, slow, expected):
        assert stack.runner is not None
        assert stack.manager is not None
        for process in (stack.manager, stack.runner) if both else (stack.runner,):
            process.signal(signal.SIGTERM)
        wait_until("the stop", lambda: stopping(stack), stack.runner)
        with Client(stack.runner_address, retry=NO_RETRIES, timeout=PATIENCE_SECONDS) as client:
            with pytest.raises(OctavoError, match="shutting down; send the request to another one") as caught:
                list(client.generate(PROMPT, max_tokens=1))
            assert (caught.value.code, caught.value.reason) == ("UNAVAILABLE", "STOPPING")
            assert [each.request_id for each in client.requests()] == ["slow"]
        assert tokens_of(map(read_chunk, slow.call)) == expected
        assert stack.runner.wait() == 0
        if both:
            assert stack.manager.wait() == 0


def test_what_is_late_ends_after_the_grace_time(tmp_path: Path) -> None:
    with held_stack(tmp_path, 0.5) as (stack, slow, expected):
        assert stack.runner is not None
        stack.runner.signal(signal.SIGTERM)
        assert stack.runner.wait() == 0
        chunks = []
        with pytest.raises(grpc.RpcError) as caught:
            chunks.extend(read_chunk(message) for message in slow.call)
        assert describe_rpc_error(caught.value).code == "UNAVAILABLE"
        assert tokens_of(chunks) == expected[: len(tokens_of(chunks))]
        # The next runner finds an empty pool, and nothing of what was.
        runner = stack.start_runner()
        wait_until("serving", lambda: not stopping(stack) and health_of(stack.runner_address) is not None, runner)
        stack.assert_nothing_held()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, number: signal.Signals) -> None:
    with held_stack(tmp_path, 600) as (stack, _, _):
        assert stack.runner is not None
        stack.runner.signal(number)
        wait_until("the stop", lambda: stopping(stack), stack.runner)
        stack.runner.signal(number)
        assert stack.runner.wait() == -number


def test_a_second_signal_ends_a_waiting_kv_manager_too(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--model", str(write_tiny_chat_model(tmp_path / "model"))) as stack:
        manager: Process | None = stack.manager
        assert manager is not None
        with stack.client() as client:
            stream = client.generate(PROMPT, ignore_eos=True)
            next(stream)
            manager.signal(signal.SIGTERM)
            wait_until("the stop", lambda: health_of(stack.kv_address) == NOT_SERVING, manager)
            manager.signal(signal.SIGTERM)
            assert manager.wait() in (-signal.SIGTERM, 0)
