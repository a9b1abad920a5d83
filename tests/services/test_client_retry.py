"""A client sends again what nobody has started, and nothing else: against servers that fail as planned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from services.client import AsyncClient, Client, OctavoError
from services.client_retry import NO_RETRIES, RetryPolicy
from services.errors import DETAILS_KEY, RUNNER_DOMAIN, RpcFailure, to_status

QUICK = RetryPolicy(attempts=3, first_seconds=0.01)


@dataclass
class PlannedRunner(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """Each Generate does the next of `plan`: a reason to be refused with, "" for UNAVAILABLE without one, or chunks."""

    plan: list[Any]
    known: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request.request_id)
        step = self.plan.pop(0)
        if isinstance(step, int):
            for number in range(step):
                yield pb.GenerateResponse(request_id="r", token_ids=[number])
            step = self.plan.pop(0)
        if step is None:
            return
        status = to_status(RpcFailure(grpc.StatusCode.UNAVAILABLE, "planned", step, RUNNER_DOMAIN))
        if step:
            context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "planned")

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self.aborts += request.request_ids
        live = [each for each in request.request_ids if each in self.known]
        return pb.AbortResponse(aborted_requests=len(live), unknown_requests=len(request.request_ids) - len(live))


class Served:
    def __init__(self, runner: PlannedRunner, retry: RetryPolicy = QUICK) -> None:
        self.runner = runner
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(runner, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._retry = retry

    def __enter__(self) -> Served:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0)

    def tokens(self, kind: str, **options: Any) -> list[int]:
        address = f"127.0.0.1:{self._port}"
        if kind == "blocking":
            with Client(address, retry=self._retry, timeout=60) as client:
                return [token for chunk in client.generate("a", **options) for token in chunk.token_ids]
        return asyncio.run(self._async_tokens(address, options))

    async def _async_tokens(self, address: str, options: dict[str, Any]) -> list[int]:
        async with AsyncClient(address, retry=self._retry, timeout=60) as client:
            return [token async for chunk in client.generate("a", **options) for token in chunk.token_ids]


both = pytest.mark.parametrize("kind", ["blocking", "asyncio"])


@both
@pytest.mark.parametrize("reason", ["NOT_READY", "STOPPING", ""])
def test_what_was_not_started_is_sent_again(kind: str, reason: str) -> None:
    with Served(PlannedRunner([reason, reason, 3, None])) as served:
        assert served.tokens(kind) == [0, 1, 2]
    assert len(served.runner.asked) == 3


@both
def test_what_has_begun_is_not(kind: str) -> None:
    with Served(PlannedRunner([2, "", 3, None])) as served, pytest.raises(OctavoError) as caught:
        served.tokens(kind)
    assert caught.value.code == "UNAVAILABLE"
    assert len(served.runner.asked) == 1


@both
def test_it_ends_after_a_few_attempts(kind: str) -> None:
    with Served(PlannedRunner(["NOT_READY"] * 9)) as served, pytest.raises(OctavoError) as caught:
        served.tokens(kind)
    assert caught.value.reason == "NOT_READY"
    assert len(served.runner.asked) == 1 + QUICK.attempts
    with Served(PlannedRunner(["NOT_READY"] * 9), NO_RETRIES) as served, pytest.raises(OctavoError):
        served.tokens(kind)
    assert len(served.runner.asked) == 1


@both
def test_an_id_is_used_again_only_when_the_server_does_not_know_it(kind: str) -> None:
    with Served(PlannedRunner(["", 1, None])) as served:
        assert served.tokens(kind, request_id="mine") == [0]
    assert (served.runner.asked, served.runner.aborts) == (["mine", "mine"], ["mine"])
    with Served(PlannedRunner(["", 1, None], known={"mine"})) as served, pytest.raises(OctavoError):
        served.tokens(kind, request_id="mine")
    assert served.runner.asked == ["mine"]
    # Who says that it has not taken the request need not be asked.
    with Served(PlannedRunner(["NOT_READY", 1, None])) as served:
        assert served.tokens(kind, request_id="mine") == [0]
    assert served.runner.aborts == []


def test_other_failures_are_not_retried() -> None:
    with Served(PlannedRunner(["ENGINE_LOST", 1, None])) as served, pytest.raises(OctavoError):
        served.tokens("blocking")
    assert len(served.runner.asked) == 1


def test_pauses_double_and_a_deadline_ends_them() -> None:
    assert list(RetryPolicy(attempts=4, first_seconds=0.1).pauses()) == [0.1, 0.2, 0.4, 0.8]
    with Served(PlannedRunner(["NOT_READY"] * 9), RetryPolicy(attempts=9, first_seconds=100)) as served:
        with pytest.raises(OctavoError) as caught:
            served.tokens("blocking")
        assert caught.value.reason == "NOT_READY"
