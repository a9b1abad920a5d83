"""Real services as real processes, on sockets in a directory of their own.

Most are forked by a process that has loaded everything (tests.e2e.nursery), which saves some seconds of CPU time each.
`afresh` says that one starts as it does for a user, from the interpreter on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.kv.v1 import kv_manager_pb2 as kv_pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import open_channel
from services.client import Client
from services.cpus import usable_cpus
from tests.e2e.nursery import Forked, the_nursery
from tests.services.kv_support import clean_environment, scrape

PATIENCE_SECONDS = 120
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def octavo(*arguments: str) -> list[str]:
    """A command line of the octavo command."""
    return [sys.executable, "-m", "services.cli", *arguments]


def run_octavo(
    *arguments: str, timeout: float = PATIENCE_SECONDS, afresh: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    environment = clean_environment(**env)
    nursery = None if afresh else the_nursery()
    if nursery is None:
        return subprocess.run(
            octavo(*arguments), capture_output=True, text=True, timeout=timeout, env=environment, check=False
        )
    with tempfile.TemporaryDirectory() as name:
        stdout, stderr = Path(name, "stdout"), Path(name, "stderr")
        process = nursery.start(list(arguments), environment, stdout, stderr)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    """A service in a child process; its output goes to a file."""

    started: ClassVar[list[Process]] = []

    def __init__(self, directory: Path, name: str, *arguments: str, afresh: bool = False, **env: str) -> None:
        self.log_path = directory / f"{name}-{time.monotonic_ns()}.log"
        self.process: subprocess.Popen[bytes] | Forked
        environment = clean_environment(**env)
        nursery = None if afresh else the_nursery()
        self.log_path.touch()
        if nursery is not None:
            self.process = nursery.start([name, *arguments], environment, self.log_path, self.log_path)
        else:
            with self.log_path.open("wb") as log:
                self.process = subprocess.Popen(
                    octavo(name, *arguments), stdout=log, stderr=subprocess.STDOUT, env=environment
                )

        self.started.append(self)

    @classmethod
    def kill_all(cls) -> None:
        """Ends what failed tests have left running."""
        for each in cls.started:
            if each.process.poll() is None:
                each.kill()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def health_of(address: str, service: str = "") -> int | None:
    """The status that grpc.health.v1 tells; None when nobody answers."""
    with open_channel(address) as channel:
        try:
            return (
                health_pb2_grpc.HealthStub(channel)
                .Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
                .status
            )
        except grpc.RpcError:
            return None


def wait_until(what: str, condition: Any, process: Process | None = None) -> None:
    """Polls until `condition()` is true; fails at once when the process has ended."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        ended = process is not None and process.process.poll() is not None
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen\n{process.log if process else ''}")
        time.sleep(0.05)


def threads_of_a_runner() -> int:
    """One for each CPU that is this process's beside its neighbours: more would wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, usable_cpus() // workers)


SMALL = {"OCTAVO_NUM_BLOCKS": "512", "OCTAVO_NUM_THREADS": str(threads_of_a_runner())}
"""Room for 8,176 tokens: a GiB, the default, costs seconds to fill with zeros, and more to keep books of."""


class Stack:
    """A KV manager and a model runner with 512 blocks. The runner serves SmolLM2 as it comes, unless told otherwise."""

    def __init__(self, directory: Path, *runner_arguments: str, afresh: bool = False, **runner_env: str) -> None:
        """afresh: the runner starts from the interpreter on."""
        self.directory = directory
        self.kv_address = f"unix:{directory}/kv.sock"
        self.runner_address = f"unix:{directory}/runner.sock"
        self.kv_metrics = f"127.0.0.1:{free_port()}"
        self.runner_metrics = f"127.0.0.1:{free_port()}"
        self._runner_arguments = runner_arguments
        self._runner_env = runner_env
        self._afresh = afresh
        self.manager: Process | None = None
        self.runner: Process | None = None

    def start_manager(self) -> Process:
        self.manager = Process(
            self.directory, "kv-manager", "--kv-address", self.kv_address, "--kv-metrics-address", self.kv_metrics
        )
        return self.manager

    def start_runner(self) -> Process:
        self.runner = Process(
            self.directory,
            "model-runner",
            *("--kv-address", self.kv_address, "--runner-address", self.runner_address),
            *("--runner-metrics-address", self.runner_metrics),
            *self._runner_arguments,
            afresh=self._afresh,
            **(SMALL | self._runner_env),
        )
        return self.runner

    def start(self) -> Stack:
        self.start_manager()
        runner = self.start_runner()
        wait_until("serving", lambda: health_of(self.runner_address) == SERVING, runner)
        return self

    def stop(self) -> None:
        for process in (self.runner, self.manager):
            if process is not None:
                process.stop()

    def client(self) -> Client:
        return Client(self.runner_address, timeout=PATIENCE_SECONDS)

    @contextmanager
    def kv(self) -> Iterator[kv_manager_pb2_grpc.KvManagerServiceStub]:
        with open_channel(self.kv_address) as channel:
            yield kv_manager_pb2_grpc.KvManagerServiceStub(channel)

    def pool(self) -> kv_pb.GetPoolResponse:
        with self.kv() as stub:
            return stub.GetPool(kv_pb.GetPoolRequest(), timeout=10)

    def reset_cache(self) -> None:
        with self.kv() as stub:
            stub.ResetCache(kv_pb.ResetCacheRequest(), timeout=10)

    def assert_nothing_held(self) -> None:
        """Every block is free, cached or leased, the books are right, and no request is listed."""
        with self.client() as client:
            wait_until("the last request's end", lambda: not client.requests())
        # The last end is told, not asked: it may still be on its way.
        wait_until("the last sequence's end", lambda: not self.pool().occupancy.sequences)
        occupancy = self.pool().occupancy
        assert occupancy.held_blocks == occupancy.leased_blocks
        assert occupancy.free_blocks + occupancy.cached_blocks + occupancy.leased_blocks == occupancy.usable_blocks
        with self.kv() as stub:
            assert list(stub.Check(kv_pb.CheckRequest(), timeout=10).violations) == []

    def kv_samples(self) -> dict[str, float]:
        return _by_text(scrape(self.kv_metrics))

    def runner_samples(self) -> dict[str, float]:
        return _by_text(scrape(self.runner_metrics))


def _by_text(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> dict[str, float]:
    """Samples keyed as they are written: name{label="value"}."""
    return {
        name + ("{" + ",".join(f'{key}="{value}"' for key, value in labels) + "}" if labels else ""): value
        for (name, labels), value in found.items()
    }


@contextmanager
def running_stack(directory: Path, *runner_arguments: str, afresh: bool = False, **runner_env: str) -> Iterator[Stack]:
    """Both services, stopped at the end."""
    stack = Stack(directory, *runner_arguments, afresh=afresh, **runner_env)
    try:
        yield stack.start()
    finally:
        stack.stop()


def golden_items() -> list[dict[str, Any]]:
    """Prompts with outputs of the same weights, recorded from another implementation."""
    path = Path(__file__).parents[1] / "data" / "golden_smollm2.json"
    return json.loads(path.read_text())["items"]


def assert_kill(process: Process) -> None:
    """kill -9."""
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
