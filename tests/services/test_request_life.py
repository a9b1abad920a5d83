"""The life of a request at a server: deadlines, ids, queues and a stop, each at its exact moment on the toy model."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from model_runner.request import FinishReason
from services.client import Client, OctavoError
from services.client_retry import NO_RETRIES
from services.errors import rpc_error_details
from tests.model_runner.toy_model import answer
from tests.services.toy_server import ToyServer, tokens_of, wait_until

PROMPT = [1, 2, 3, 4, 5]


def test_a_deadline_that_is_shorter_than_the_queue(tmp_path: Path) -> None:
    with ToyServer(tmp_path, scheduling={"max_sequences": 1}) as server, server.client() as client:
        running = client.generate(PROMPT, request_id="running")
        next(running)
        with (
            Client(server.address, timeout=0.2) as hasty,
            pytest.raises(OctavoError, match="DEADLINE_EXCEEDED") as caught,
        ):
            list(hasty.generate(PROMPT, request_id="hasty", max_tokens=1))
        assert caught.value.code == "DEADLINE_EXCEEDED"
        wait_until(lambda: [each.request_id for each in client.requests()] == ["running"])
        # It has left the line: who comes now is next.
        behind = client.generate(PROMPT, request_id="behind", max_tokens=4)
        client.abort("running")
        assert tokens_of(list(behind)) == answer(PROMPT, 4)
        assert list(running)[-1].finish_reason is FinishReason.ABORT


def test_a_deadline_that_expires_gives_the_blocks_back_before_the_next_step(tmp_path: Path) -> None:
    """The step is held up until the server knows that the time is up; in the next one only the other is computed."""
    cancelled = threading.Event()
    with ToyServer(tmp_path) as server, server.client() as client:
        cancel = server.engine.cancel

        def note(live):
            cancel(live)
            cancelled.set()

        server.engine.cancel = note
        server.executor.before_step[5] = lambda: cancelled.wait(60)
        with Client(server.address, timeout=1.0) as hasty:
            doomed = hasty.generate(PROMPT, request_id="doomed")
            next(doomed)
            other = client.generate(PROMPT, request_id="other", max_tokens=20)
            with pytest.raises(OctavoError, match="DEADLINE_EXCEEDED"):
                list(doomed)
        assert tokens_of(list(other)) == answer(PROMPT, 20)
        assert cancelled.is_set()
        assert [len(step) for step in server.executor.steps[6:]] == [1] * len(server.executor.steps[6:])


def test_a_live_id_is_taken(tmp_path: Path) -> None:
    with ToyServer(tmp_path) as server, server.client() as client:
        stream = client.generate(PROMPT, request_id="a")
        next(stream)
        with pytest.raises(OctavoError, match="'a' is live already") as caught:
            list(client.generate(PROMPT, request_id="a", max_tokens=1))
        assert (caught.value.code, caught.value.reason) == ("ALREADY_EXISTS", "DUPLICATE_REQUEST")
        assert client.abort("a", "a", "b") == (1, 1)
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
        assert tokens_of(list(client.generate(PROMPT, request_id="a", max_tokens=2))) == answer(PROMPT, 2)


def test_an_id_that_is_used_over_and_over_is_never_mixed_up(tmp_path: Path) -> None:
    """Whoever gets in gets the answer to its own prompt, however close another of its id ended before."""
    with ToyServer(tmp_path) as server, server.client() as client, ThreadPoolExecutor(8) as threads:

        def ask(seed: int) -> bool:
            prompt = random.Random(seed).choices(range(40), k=4)
            try:
                chunks = list(client.generate(prompt, request_id="a", max_tokens=2))
            except OctavoError as error:
                assert error.code == "ALREADY_EXISTS"  # noqa: PT017 - most of them get in
                return False
            assert tokens_of(chunks) == answer(prompt, 2)
            return True

        assert sum(threads.map(ask, range(1000))) > 10


def test_a_full_queue_says_when_to_come_back(tmp_path: Path) -> None:
    with ToyServer(tmp_path, scheduling={"max_sequences": 1}, max_queued=2) as server, server.client() as client:
        running = client.generate(PROMPT, request_id="running")
        next(running)
        queued = [client.generate(PROMPT, request_id=name, max_tokens=3) for name in "ab"]
        threads = [threading.Thread(target=list, args=(stream,)) for stream in queued]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.engine.counts() == (1, 2))
        with pytest.raises(OctavoError, match="2 requests wait already") as caught:
            list(client.generate(PROMPT, max_tokens=1))
        assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL")
        cause = caught.value.__context__
        assert isinstance(cause, grpc.RpcError)
        retry = [each for each in rpc_error_details(cause) if isinstance(each, error_details_pb2.RetryInfo)]
        # One request was admitted: the line has no speed yet.
        assert [each.retry_delay.seconds for each in retry] == [1]
        client.abort("running")
        list(running)
        for thread in threads:
            thread.join()


def test_a_server_that_stops_takes_nothing_new_and_ends_what_is_late(tmp_path: Path) -> None:
    with ToyServer(tmp_path, scheduling={"max_sequences": 1}) as server, server.client(retry=NO_RETRIES) as client:
        running = client.generate(PROMPT, request_id="running")
        first = next(running)
        queued = client.generate(PROMPT, request_id="queued", max_tokens=3)
        reader = threading.Thread(target=lambda: failures.append(failure_of(queued)))
        failures: list[OctavoError] = []
        reader.start()
        wait_until(lambda: server.engine.counts() == (1, 1))
        server.answering.traffic.stopping = True
        with pytest.raises(OctavoError, match="shutting down; send the request to another one") as refused:
            list(client.generate(PROMPT))
        assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "STOPPING")
        # Who watches still can, and so can who wants a request to end.
        assert len(client.requests()) == 2
        server.engine.stop()
        ended = failure_of(running)
        reader.join()
        assert (ended.code, ended.reason) == ("UNAVAILABLE", "STOPPING")
        assert "tokens of the answer" in ended.sentence
        assert first.token_ids[0] == answer(PROMPT, 1)[0]
        assert (failures[0].code, failures[0].reason) == ("UNAVAILABLE", "STOPPING")
        assert "has not begun" in failures[0].sentence


def failure_of(stream) -> OctavoError:
    with pytest.raises(OctavoError) as caught:
        list(stream)
    return caught.value
