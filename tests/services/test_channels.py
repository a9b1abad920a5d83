"""Channels to a server that is slow to say its first word, or not there yet."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import open_aio_channel
from tests.services.kv_support import WAIT_SECONDS, kv_process

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
