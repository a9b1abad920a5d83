"""The latency histogram has the code that the client got, whatever way an RPC ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from kvmanager.errors import PoolShort
from services.channels import open_aio_channel
from services.errors import RUNNER_DOMAIN, describe_rpc_error, kv_failure
from services.grpc_server import MIB, bind, create_server
from services.rpc_interceptor import RpcInterceptor

SERVICE = "octavo.runner.v1.ModelRunnerService"


class Runner(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """Ends as the request id says; `closed` tells that a stream's generator was."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        await end_as(request.request_ids[0], context)
        return pb.AbortResponse()

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse()
            await end_as(request.request_id, context)
            yield pb.GenerateResponse()
        finally:
            self.closed.set()


async def end_as(how: str, context: grpc.aio.ServicerContext) -> None:
    match how:
        case "abort":
            await context.abort(grpc.StatusCode.ABORTED, "as asked")
        case "refuse":
            raise PoolShort("too full", needed_blocks=3)
        case "crash":
            raise KeyError("secret")
        case "abort, then crash":
            with suppress(grpc.aio.AbortError):
                await context.abort(grpc.StatusCode.ABORTED, "as asked")
            raise KeyError("secret")
        case "hang":
            await asyncio.sleep(60)


Call = Callable[[model_runner_pb2_grpc.ModelRunnerServiceStub, Runner], Awaitable[Any]]


def counted(directory: Path, call: Call) -> dict[tuple[str, str], float]:
    """Makes the call at a real server and returns how many RPCs the histogram has, by method and code."""

    async def work() -> dict[tuple[str, str], float]:
        registry, runner = CollectorRegistry(), Runner()
        server = create_server(MIB, [RpcInterceptor(registry, kv_failure, RUNNER_DOMAIN)])
        model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(runner, server)
        address = bind(server, f"unix:{directory}/r.sock")
        await server.start()
        async with open_aio_channel(address) as channel:
            await call(model_runner_pb2_grpc.ModelRunnerServiceStub(channel), runner)
        await server.stop(5)
        return counts(registry)

    return asyncio.run(work())


def counts(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    found = [each for family in registry.collect() for each in family.samples if each.name.endswith("_count")]
    assert all(each.labels["service"] == SERVICE for each in found)
    return {(each.labels["method"], each.labels["code"]): each.value for each in found}


async def failing(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def read_all(stream: Any) -> int:
    return len([each async for each in stream])


@pytest.mark.parametrize(
    ("how", "code"), [("abort", "ABORTED"), ("refuse", "RESOURCE_EXHAUSTED"), ("crash", "INTERNAL")]
)
def test_failures_of_both_kinds_of_verbs(tmp_path: Path, how: str, code: str) -> None:
    async def call(stub: Any, runner: Runner) -> None:
        unary = await failing(stub.Abort(pb.AbortRequest(request_ids=[how])))
        stream = await failing(read_all(stub.Generate(pb.GenerateRequest(request_id=how))))
        for error in (unary, stream):
            view = describe_rpc_error(error)
            assert view.code == code
            assert "secret" not in view.sentence

    assert counted(tmp_path, call) == {("Abort", code): 1, ("Generate", code): 1}


def test_an_error_after_the_status_is_told_to_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As when a client goes while it is told why its call fails."""

    async def call(stub: Any, runner: Runner) -> None:
        error = await failing(stub.Abort(pb.AbortRequest(request_ids=["abort, then crash"])))
        assert error.code() is grpc.StatusCode.ABORTED

    with capture_logs() as logs:
        assert counted(tmp_path, call) == {("Abort", "ABORTED"): 1}
    assert logs == []
    assert caplog.records == []


def test_success_of_both_kinds_of_verbs(tmp_path: Path) -> None:
    async def call(stub: Any, runner: Runner) -> None:
        await stub.Abort(pb.AbortRequest(request_ids=["fine"]))
        assert await read_all(stub.Generate(pb.GenerateRequest())) == 2

    assert counted(tmp_path, call) == {("Abort", "OK"): 1, ("Generate", "OK"): 1}


def test_a_dropped_stream_is_cancelled_and_its_generator_closed(tmp_path: Path) -> None:
    async def call(stub: Any, runner: Runner) -> None:
        stream = stub.Generate(pb.GenerateRequest(request_id="hang"))
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(runner.closed.wait(), 30)

    assert counted(tmp_path, call) == {("Generate", "CANCELLED"): 1}


def test_a_deadline_is_told_from_a_cancellation(tmp_path: Path) -> None:
    async def call(stub: Any, runner: Runner) -> None:
        request = pb.GenerateRequest(request_id="hang")
        error = await failing(read_all(stub.Generate(request, timeout=0.2)))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(runner.closed.wait(), 30)

    assert counted(tmp_path, call) == {("Generate", "DEADLINE_EXCEEDED"): 1}


def test_a_verb_that_the_servicer_lacks_is_unimplemented(tmp_path: Path) -> None:
    async def call(stub: Any, runner: Runner) -> None:
        error = await failing(stub.GetModel(pb.GetModelRequest()))
        assert describe_rpc_error(error)[::2] == ("UNIMPLEMENTED", "UNIMPLEMENTED")

    assert counted(tmp_path, call) == {("GetModel", "UNIMPLEMENTED"): 1}
