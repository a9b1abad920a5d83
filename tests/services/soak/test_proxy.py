"""The proxy does to messages what it is told, and to nothing but steps and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import open_aio_channel
from services.soak.faults import FaultKind
from services.soak.proxy import FaultyProxy, MessageFault
from tests.services.kv_support import kv_settings, running_kv_manager

SPEC = pb.PoolSpec(num_blocks=10, block_size=16, model_fingerprint="test")
ALWAYS = 1.0


class Talk:
    """A session through the proxy, by hand."""

    def __init__(self, stub: kv_manager_pb2_grpc.KvManagerServiceStub) -> None:
        self._call = stub.Session()
        self._epoch = 0

    async def open(self) -> None:
        await self._call.write(pb.SessionRequest(open=pb.SessionOpen(pool_id="p", spec=SPEC, runner_id="r")))
        self._epoch = (await self._call.read()).opened.epoch

    async def step(self, number: int) -> None:
        await self._call.write(pb.SessionRequest(step=pb.SessionStep(epoch=self._epoch, number=number)))

    async def heard(self, seconds: float = 5.0) -> str | None:
        """The next answer as kind and number; None when none comes in time."""
        try:
            response = await asyncio.wait_for(self._call.read(), seconds)
        except TimeoutError:
            return None
        kind = response.WhichOneof("message")
        return f"answer {response.answer.number}" if kind == "answer" else str(kind)


async def proxied(directory: Path, upstream: str) -> AsyncIterator[tuple[FaultyProxy, Talk]]:
    proxy = FaultyProxy(f"unix:{directory}/proxy.sock", upstream, Random(1))
    await proxy.start()
    try:
        async with open_aio_channel(f"unix:{directory}/proxy.sock") as channel:
            yield proxy, Talk(kv_manager_pb2_grpc.KvManagerServiceStub(channel))
    finally:
        await proxy.stop()


def run(directory: Path, test) -> None:
    """A test with a proxy in front of a real KV manager."""

    async def work(upstream: str) -> None:
        async for proxy, talk in proxied(directory, upstream):
            await test(proxy, talk)

    with running_kv_manager(kv_settings(directory)) as manager:
        asyncio.run(work(manager.address))


def test_all_goes_over(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        for number in (1, 2, 3):
            await talk.step(number)
            assert await talk.heard() == f"answer {number}"
        assert not proxy.hits

    run(tmp_path, test)


def test_a_lost_message(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        proxy.fault = MessageFault(FaultKind.LOSE, ALWAYS)
        await talk.step(1)
        assert await talk.heard(0.3) is None
        proxy.fault = None
        assert proxy.hits == {FaultKind.LOSE: 1}

    run(tmp_path, test)


def test_what_opens_a_session_is_never_lost(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        proxy.fault = MessageFault(FaultKind.LOSE, ALWAYS)
        await talk.open()
        assert not proxy.hits

    run(tmp_path, test)


def test_a_doubled_message(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        proxy.fault = MessageFault(FaultKind.DOUBLE, ALWAYS)
        await talk.step(1)
        # The step comes twice, is answered twice, and each answer comes twice.
        assert [await talk.heard() for _ in range(4)] == ["answer 1"] * 4
        assert proxy.hits == {FaultKind.DOUBLE: 3}

    run(tmp_path, test)


def test_a_message_out_of_order(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        proxy.fault = MessageFault(FaultKind.REORDER, ALWAYS)
        await talk.step(1)
        while not proxy.hits:
            await asyncio.sleep(0.001)
        proxy.fault = None
        await talk.step(2)
        # The second one overtakes the first, and comes too early.
        assert await talk.heard() == "gap"
        assert await talk.heard() == "answer 1"

    run(tmp_path, test)


def test_a_late_message_keeps_the_order(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        proxy.fault = MessageFault(FaultKind.DELAY, ALWAYS)
        await talk.step(1)
        await talk.step(2)
        assert [await talk.heard(), await talk.heard()] == ["answer 1", "answer 2"]
        assert proxy.hits == {FaultKind.DELAY: 4}

    run(tmp_path, test)


def test_a_cut_session(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        proxy.fault = MessageFault(FaultKind.CUT, ALWAYS)
        await talk.step(1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await talk.heard()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE

    run(tmp_path, test)


def test_an_error_keeps_its_details(tmp_path: Path):
    async def test(proxy: FaultyProxy, talk: Talk) -> None:
        await talk.open()
        # Numbers begin with 1; another epoch than the session's ends it.
        talk._epoch += 1
        await talk.step(1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await talk.heard()
        assert error.value.code() is grpc.StatusCode.ABORTED
        assert any(key == "grpc-status-details-bin" for key, _ in error.value.trailing_metadata())

    run(tmp_path, test)
