"""The proxy does to messages what it is told, and to nothing but steps and answers, by gRPC and by the socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Protocol

import grpc
import pytest
from google.rpc import status_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.addresses import session_address
from services.channels import open_aio_channel
from services.errors import describe_rpc_error, view_of_status
from services.session_frames import CONTRACT, GREETING, STATUS, FrameReader, message_frame
from services.soak.faults import FaultKind
from services.soak.message_faults import MessageFault, MessageFaults
from services.soak.proxy import FaultyProxy
from tests.services.kv_support import kv_settings, running_kv_manager
from tests.services.runner_streams import WAYS

SPEC = pb.PoolSpec(num_blocks=10, block_size=16, model_fingerprint="test")
ALWAYS = 1.0


class Ended(Exception):
    """The session has ended: code and reason."""


class Wire(Protocol):
    """What carries the messages."""

    async def write(self, message: pb.SessionRequest) -> None: ...

    async def read(self) -> pb.SessionResponse:
        """The next message. Raises Ended."""


class GrpcWire:
    def __init__(self, stub: kv_manager_pb2_grpc.KvManagerServiceStub) -> None:
        self._call = stub.Session()

    async def write(self, message: pb.SessionRequest) -> None:
        await self._call.write(message)

    async def read(self) -> pb.SessionResponse:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            view = describe_rpc_error(error)
            raise Ended(view.code, view.reason) from None


class SocketWire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._frames = FrameReader(1 << 20)

    async def write(self, message: pb.SessionRequest) -> None:
        self._writer.write(message_frame(message))

    async def read(self) -> pb.SessionResponse:
        kind, payload = await self.frame()
        if kind == STATUS:
            view = view_of_status(status_pb2.Status.FromString(payload))
            raise Ended(view.code, view.reason)
        return pb.SessionResponse.FromString(payload)

    async def frame(self) -> tuple[int, bytes]:
        while (found := self._frames.next()) is None:
            data = await self._reader.read(1 << 16)
            if not data:
                raise Ended("UNAVAILABLE", "")
            self._frames.feed(data)
        return found


class Talk:
    """A session through the proxy, by hand."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.epoch = 0

    async def open(self) -> None:
        opening = pb.SessionOpen(pool_id="p", spec=SPEC, runner_id="r")
        await self._wire.write(pb.SessionRequest(open=opening))
        self.epoch = (await self._wire.read()).opened.epoch

    async def step(self, number: int) -> None:
        await self._wire.write(pb.SessionRequest(step=pb.SessionStep(epoch=self.epoch, number=number)))

    async def heard(self, seconds: float = 5.0) -> str | None:
        """The next answer as kind and number; None when none comes in time. Raises Ended."""
        try:
            response = await asyncio.wait_for(self._wire.read(), seconds)
        except TimeoutError:
            return None
        kind = response.WhichOneof("message")
        return f"answer {response.answer.number}" if kind == "answer" else str(kind)


@asynccontextmanager
async def wire_by(way: str, address: str) -> AsyncIterator[Wire]:
    if way == "grpc":
        async with open_aio_channel(address) as channel:
            yield GrpcWire(kv_manager_pb2_grpc.KvManagerServiceStub(channel))
        return
    beside = session_address(address)
    assert beside is not None
    reader, writer = await asyncio.open_unix_connection(beside.path)
    wire = SocketWire(reader, writer)
    assert await wire.frame() == (GREETING, CONTRACT)
    yield wire
    writer.close()


Test = Callable[[MessageFaults, Talk], Awaitable[None]]


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Test], None]:
    """Runs a test with a proxy in front of a real KV manager."""

    async def work(upstream: str, test: Test) -> None:
        address, faults = f"unix:{tmp_path}/proxy.sock", MessageFaults(Random(1))
        proxy = FaultyProxy(address, upstream, faults, by_socket=request.param == "socket")
        await proxy.start()
        try:
            async with wire_by(request.param, address) as wire:
                await test(faults, Talk(wire))
        finally:
            await proxy.stop()

    def work_with_a_manager(test: Test) -> None:
        with running_kv_manager(kv_settings(tmp_path)) as manager:
            asyncio.run(work(manager.address, test))

    return work_with_a_manager


def test_all_goes_over(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        for number in (1, 2, 3):
            await talk.step(number)
            assert await talk.heard() == f"answer {number}"
        assert not faults.hits

    run(test)


def test_a_lost_message(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        faults.fault = MessageFault(FaultKind.LOSE, ALWAYS)
        await talk.step(1)
        assert await talk.heard(0.3) is None
        faults.fault = None
        assert faults.hits == {FaultKind.LOSE: 1}

    run(test)


def test_what_opens_a_session_is_never_lost(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        faults.fault = MessageFault(FaultKind.LOSE, ALWAYS)
        await talk.open()
        assert not faults.hits

    run(test)


def test_a_doubled_message(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        faults.fault = MessageFault(FaultKind.DOUBLE, ALWAYS)
        await talk.step(1)
        # The step comes twice, is answered twice, and each answer comes twice.
        assert [await talk.heard() for _ in range(4)] == ["answer 1"] * 4
        assert faults.hits == {FaultKind.DOUBLE: 3}

    run(test)


def test_a_message_out_of_order(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        faults.fault = MessageFault(FaultKind.REORDER, ALWAYS)
        await talk.step(1)
        while not faults.hits:
            await asyncio.sleep(0.001)
        faults.fault = None
        await talk.step(2)
        # The second one overtakes the first, and comes too early.
        assert await talk.heard() == "gap"
        assert await talk.heard() == "answer 1"

    run(test)


def test_a_late_message_keeps_the_order(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        faults.fault = MessageFault(FaultKind.DELAY, ALWAYS)
        await talk.step(1)
        await talk.step(2)
        assert [await talk.heard(), await talk.heard()] == ["answer 1", "answer 2"]
        assert faults.hits == {FaultKind.DELAY: 4}

    run(test)


def test_a_cut_session(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        faults.fault = MessageFault(FaultKind.CUT, ALWAYS)
        await talk.step(1)
        with pytest.raises(Ended) as ended:
            await talk.heard()
        assert ended.value.args == ("UNAVAILABLE", "")

    run(test)


def test_an_error_keeps_its_details(run: Callable[[Test], None]):
    async def test(faults: MessageFaults, talk: Talk) -> None:
        await talk.open()
        # Numbers begin with 1; another epoch than the session's ends it.
        talk.epoch += 1
        await talk.step(1)
        with pytest.raises(Ended) as ended:
            await talk.heard()
        assert ended.value.args == ("ABORTED", "STALE_EPOCH")

    run(test)


def test_where_nobody_is_the_socket_hangs_up(tmp_path: Path):
    async def work() -> None:
        proxy = FaultyProxy(
            f"unix:{tmp_path}/proxy.sock", f"unix:{tmp_path}/kv.sock", MessageFaults(Random(1)), by_socket=True
        )
        await proxy.start()
        try:
            reader, writer = await asyncio.open_unix_connection(f"{tmp_path}/proxy.sock.session")
            assert await asyncio.wait_for(reader.read(), 5.0) == b""
            writer.close()
        finally:
            await proxy.stop()

    asyncio.run(work())
