"""The processes under test: one KV manager, and runners with a pool each. They are ended by their own process ids."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.addresses import SESSION_SUFFIX, free_port
from services.channels import open_aio_channel
from services.errors import StartupError
from services.supervisor import die_with_parent

START_SECONDS = 180.0
"""A runner loads torch and a model, perhaps on a busy machine."""
POLL_SECONDS = 0.1
CALL_SECONDS = 5.0
STOP_SECONDS = 20.0
NUM_BLOCKS = (24, 120)
"""Of the pools in turn: so few that sequences are preempted, and so few that cached blocks are given up."""
HOW_STEPS_RUN = (("--async-steps", "on"), ("--speculative-tokens", "6"))
"""Of the runners in turn: one plans a step while the last one runs, one guesses tokens; answers must be the same."""


@dataclass(slots=True)
class Child:
    """A process and the file that its output goes to."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()

    def last_words(self) -> str:
        """The end of what it said."""
        return self.log.read_text(errors="replace")[-500:]

    async def stop(self) -> None:
        """SIGTERM, and kill -9 when that does not help."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(self.process.wait, STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass(frozen=True, slots=True)
class RunnerPlace:
    """Where a runner is: its pool, where it listens, and where it finds its KV manager."""

    pool: str
    address: str
    metrics: str
    kv_address: str


class Stack:
    """A KV manager and its runners, in one directory."""

    def __init__(self, directory: Path, kv_addresses: list[str]) -> None:
        """kv_addresses: by runner, where it finds the KV manager."""
        self.directory = directory
        self.kv_path = directory / "kv.sock"
        self.kv_address = f"unix:{self.kv_path}"
        self.places = [
            RunnerPlace(
                f"pool-{number}",
                f"unix:{directory}/runner-{number}.sock",
                f"127.0.0.1:{free_port()}",
                kv_address,
            )
            for number, kv_address in enumerate(kv_addresses)
        ]
        self.manager: Child | None = None
        self.runners: list[Child] = []

    def start_manager(self) -> None:
        """Starts the KV manager in the place of the last one."""
        arguments = ("--kv-address", self.kv_address, "--kv-metrics-address", "127.0.0.1:0")
        self.manager = self._start("kv-manager", *arguments)

    def start_runner(self, number: int) -> None:
        """Starts a runner in the place of the last one of that number."""
        place = self.places[number]
        blocks = NUM_BLOCKS[number % len(NUM_BLOCKS)]
        child = self._start(
            "model-runner",
            *("--kv-address", place.kv_address, "--runner-address", place.address, "--pool", place.pool),
            *("--runner-metrics-address", place.metrics, "--num-blocks", str(blocks), "--num-threads", "1"),
            *HOW_STEPS_RUN[number % len(HOW_STEPS_RUN)],
        )
        self.runners[number : number + 1] = [child]

    async def until_serving(self, number: int) -> None:
        """Returns when a runner serves. Raises StartupError when it ends instead, or takes too long."""
        place, child = self.places[number], self.runners[number]
        async with open_aio_channel(place.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(round(START_SECONDS / POLL_SECONDS)):
                if await _is_serving(stub):
                    return
                if child.process.poll() is not None:
                    raise StartupError(f"Runner {number} has ended:\n{child.log.read_text(errors='replace')}")
                await asyncio.sleep(POLL_SECONDS)
        raise StartupError(f"Runner {number} does not serve:\n{child.log.read_text(errors='replace')}")

    async def pool(self, number: int) -> pb.GetPoolResponse | None:
        """How a runner's pool is; None when the KV manager does not answer, or does not know it."""
        async with open_aio_channel(self.kv_address) as channel:
            stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)
            with suppress(grpc.aio.AioRpcError):
                request = pb.GetPoolRequest(pool_id=self.places[number].pool)
                answer: pb.GetPoolResponse = await stub.GetPool(request, timeout=CALL_SECONDS)
                return answer
        return None

    async def check(self, number: int) -> tuple[str, ...]:
        """What check() finds wrong with a runner's pool."""
        async with open_aio_channel(self.kv_address) as channel:
            stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)
            request = pb.CheckRequest(pool_id=self.places[number].pool)
            try:
                return tuple((await stub.Check(request, timeout=10 * CALL_SECONDS)).violations)
            except grpc.aio.AioRpcError as error:
                return (f"check() failed: {error.details()}",)

    async def stop(self) -> None:
        """Ends all processes, the runners first."""
        for child in (*self.runners, self.manager):
            if child is not None:
                await child.stop()

    def _start(self, name: str, *arguments: str) -> Child:
        path = self.directory / f"{name}-{len(list(self.directory.glob('*.log'))):03}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")}
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", name, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        return Child(name, process, path)


@contextmanager
def deaf_sockets(kv_path: Path) -> Iterator[None]:
    """In the place of a KV manager, at both of its sockets."""
    with deaf_socket(kv_path), deaf_socket(kv_path.with_name(kv_path.name + SESSION_SUFFIX)):
        yield


@contextmanager
def deaf_socket(path: Path) -> Iterator[None]:
    """Accepts whoever comes, and never says a word."""
    path.unlink(missing_ok=True)
    taken: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(64)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    taken.append(listener.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in taken:
                each.close()
            path.unlink()


async def _is_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
    except grpc.aio.AioRpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
