"""Channels to a server that is slow to say its first word, or not there yet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import CHANNEL_OPTIONS, open_aio_channel
from tests.services.kv_support import WAIT_SECONDS, kv_process, kv_settings, running_kv_manager
from tests.services.late_door import late_door

STOPPED_SECONDS = 2.0
"""How long the server can't answer: twice as long as a connection attempt was once given."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A KV manager in a process of its own, and its address."""
    with kv_process(tmp_path) as server:
        yield server


def test_a_server_that_is_late_with_its_greeting_is_waited_for(server: tuple[subprocess.Popen[bytes], str]) -> None:
    """The system accepts the connection in its stead; a busy server is not gone. Nothing waits for it to be ready."""
    process, address = server

    async def call() -> grpc.StatusCode:
        async with open_aio_channel(address) as channel:
            stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            answer = asyncio.create_task(_code(stub.GetPool(pb.GetPoolRequest(pool_id="none"), timeout=WAIT_SECONDS)))
            await asyncio.wait([answer], timeout=STOPPED_SECONDS)
            process.send_signal(signal.SIGCONT)
            return await answer

    # It answers, namely that it has no such pool.
    assert asyncio.run(call()) is grpc.StatusCode.NOT_FOUND


def test_nobody_at_the_address_is_told_at_once(tmp_path: Path) -> None:
    async def call() -> grpc.StatusCode:
        async with open_aio_channel(f"unix:{tmp_path}/none.sock") as channel:
            stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)
            return await _code(stub.GetPool(pb.GetPoolRequest(), timeout=WAIT_SECONDS))

    assert asyncio.run(call()) is grpc.StatusCode.UNAVAILABLE


async def _code(call: grpc.aio.UnaryUnaryCall) -> grpc.StatusCode:
    return await call.code()


WAITING_CALLS = 8
ONCE_TOO_SHORT = dict(CHANNEL_OPTIONS) | {"grpc.min_reconnect_backoff_ms": 1_000}
"""What the options were when calls failed."""
LATE_SECONDS = 2.0


@pytest.mark.parametrize(
    ("options", "code"),
    [(dict(CHANNEL_OPTIONS), grpc.StatusCode.NOT_FOUND), (ONCE_TOO_SHORT, grpc.StatusCode.UNAVAILABLE)],
    ids=["as it is", "an attempt to connect of one second"],
)
def test_calls_wait_for_a_server_that_accepts_late(tmp_path: Path, options: dict[str, int], code: object) -> None:
    """A busy server's connections stand in the system's line, and no call that waits for one may fail for it.

    With the options of before each of them does: that is what this test would find.
    """
    opens = threading.Event()
    settings = kv_settings(tmp_path)
    with (
        running_kv_manager(settings),
        late_door(tmp_path / "door.sock", tmp_path / "kv.sock", opens) as address,
        grpc.insecure_channel(address, options=list(options.items())) as channel,
    ):
        stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)
        request = pb.GetPoolRequest(pool_id="none")
        calls = [stub.GetPool.future(request, timeout=WAIT_SECONDS) for _ in range(WAITING_CALLS)]
        opens.wait(LATE_SECONDS)
        opens.set()
        # It answers, namely that it has no such pool.
        assert {call.code() for call in calls} == {code}
