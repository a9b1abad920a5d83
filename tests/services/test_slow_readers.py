"""Clients that do not read: each slows itself alone, what waits for it is bounded, and in the end nothing is held."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.request import SamplingParams
from services.client import generate_request
from services.errors import describe_rpc_error
from services.runner_wire import read_chunk
from tests.model_runner.toy_model import answer
from tests.services.silent_client import Silent
from tests.services.toy_server import ToyServer, tokens_of, wait_until

TOKENS = 400
LOGPROBS = 20
ENTRIES = 2 + LOGPROBS
"""Of a token: itself, its log-probability and those of the candidates."""
LIMIT = 10 * ENTRIES


def prompt_of(seed: int) -> list[int]:
    return random.Random(seed).choices(range(40), k=9)


def paused(server: ToyServer, name: str) -> bool:
    return any(view.request_id == name and view.paused for view in server.engine.requests())


@pytest.mark.parametrize("choices", [1, 3])
def test_who_does_not_read_slows_itself_alone(tmp_path: Path, choices: int) -> None:
    request = generate_request(
        prompt_of(0), request_id="slow", max_tokens=TOKENS, logprobs=LOGPROBS, n=choices, temperature=1.0, seed=3
    )
    with (
        ToyServer(tmp_path, num_blocks=1025, max_unread_tokens=LIMIT) as server,
        Silent(server.address, request) as slow,
    ):
        with server.client() as client, ThreadPoolExecutor(8) as threads:

            def ask(seed: int) -> list[int]:
                return tokens_of(list(client.generate(prompt_of(seed), max_tokens=TOKENS)))

            answers = list(threads.map(ask, range(1, 9)))
            assert answers == [answer(prompt_of(seed), TOKENS) for seed in range(1, 9)]
            wait_until(lambda: paused(server, "slow"))
            # More than the limit comes while the event loop and the engine hear of it, but nothing like the answer.
            assert LIMIT // 4 < server.unread()["slow"] < choices * TOKENS * ENTRIES // 2
            assert [each.state for each in client.requests()] == [pb.REQUEST_STATE_PAUSED]
            assert server.pool.occupancy().held_blocks == 0
        chunks = [read_chunk(message) for message in slow.call]
        sampling = SamplingParams(temperature=1.0)
        for choice in range(choices):
            assert tokens_of(chunks, choice) == answer(prompt_of(0), TOKENS, sampling, seed=3 + choice)
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.pauses >= 1
        assert usage.output_tokens == TOKENS * choices


def test_who_never_reads_is_ended_and_holds_nothing(tmp_path: Path) -> None:
    request = generate_request(prompt_of(0), request_id="slow", max_tokens=TOKENS, logprobs=LOGPROBS)
    with (
        ToyServer(tmp_path, num_blocks=1025, max_unread_tokens=LIMIT, slow_reader_seconds=0.2) as server,
        Silent(server.address, request) as slow,
    ):
        with server.client() as client:
            wait_until(lambda: not client.requests())
        server.assert_nothing_held()
        assert server.unread() == {}
        # What was on its way comes, and then why no more does.
        with pytest.raises(grpc.RpcError) as caught:
            list(slow.call)
        view = describe_rpc_error(caught.value)
        assert (view.code, view.reason) == ("RESOURCE_EXHAUSTED", "SLOW_READER")
        assert "read nothing for 0.2 seconds" in view.sentence


def test_a_finished_answer_waits_for_its_client_no_longer_either(tmp_path: Path) -> None:
    """The engine is done with the request, and what is left of it would take memory for ever."""
    request = generate_request(prompt_of(0), request_id="slow", max_tokens=60, logprobs=LOGPROBS)
    with (
        ToyServer(tmp_path, num_blocks=1025, slow_reader_seconds=0.2) as server,
        Silent(server.address, request) as slow,
    ):
        wait_until(lambda: server.executor.steps and not server.engine.requests())
        wait_until(lambda: not server.unread())
        with pytest.raises(grpc.RpcError, match="read nothing"):
            list(slow.call)


def test_who_reads_slowly_is_never_ended(tmp_path: Path) -> None:
    """As long as something is read now and then, it goes on: here one message each time that the request has paused."""
    request = generate_request(prompt_of(0), request_id="slow", max_tokens=TOKENS, logprobs=LOGPROBS)
    with (
        ToyServer(tmp_path, num_blocks=1025, max_unread_tokens=LIMIT) as server,
        Silent(server.address, request) as slow,
    ):
        chunks = []
        for message in slow.call:
            chunks.append(read_chunk(message))
            if len(chunks) < 5:
                wait_until(lambda: paused(server, "slow") or not server.engine.requests())
        assert tokens_of(chunks) == answer(prompt_of(0), TOKENS)
        assert len(chunks) < TOKENS


def test_a_client_that_leaves_while_it_is_paused(tmp_path: Path) -> None:
    request = generate_request(prompt_of(0), request_id="slow", max_tokens=TOKENS, logprobs=LOGPROBS)
    with ToyServer(tmp_path, num_blocks=1025, max_unread_tokens=LIMIT) as server:
        with Silent(server.address, request):
            wait_until(lambda: paused(server, "slow"))
        server.assert_nothing_held()
        with server.client() as client:
            assert tokens_of(list(client.generate(prompt_of(1), max_tokens=3))) == answer(prompt_of(1), 3)
