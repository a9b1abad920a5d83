"""Services as child processes: started together, waited for, and stopped together."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channels import ClientTls, open_channel

POLL_SECONDS = 0.1
KILL_AFTER_SECONDS = 5.0
"""Beyond the grace time, before a child that does not end is killed."""

_PR_SET_PDEATHSIG = 1


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived."""


class ServiceEnded(Exception):
    """A service has ended on its own. With code EXIT_UNABLE it has said in one line why it could not start."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} has ended with exit code {code}; the others are stopped.")
        self.code = code


@dataclass(frozen=True, slots=True)
class Service:
    """A child process and, of Octavo's own, where it can be asked whether it is ready."""

    name: str
    process: subprocess.Popen[bytes]
    address: str = ""


class Supervisor:
    """Starts services, notices when one ends, and never leaves one behind."""

    def __init__(self, grace_seconds: float, tls: ClientTls | None = None) -> None:
        self._grace_seconds = grace_seconds
        self._tls = tls
        self.services: list[Service] = []

    def start(self, name: str, arguments: Sequence[str], address: str) -> Service:
        """Starts `octavo NAME ARGUMENTS`."""
        return self._add(name, [sys.executable, "-m", "services.cli", name, *arguments], address)

    def start_other(self, name: str, command: Sequence[str]) -> Service:
        """Starts a program that is not Octavo's. What it prints is lost; what it complains of is not."""
        return self._add(name, command, "", stdout=subprocess.DEVNULL)

    def wait_ready(self, service: Service) -> None:
        """Returns once grpc.health.v1 says SERVING. Raises ServiceEnded when one has ended instead."""
        with open_channel(service.address, self._tls) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not _is_serving(stub):
                self.check_alive()
                time.sleep(POLL_SECONDS)
        # What answered might be somebody else's, while ours could not listen.
        self.check_alive()

    def pause(self) -> None:
        """Waits for a moment. Raises ServiceEnded when a service has ended."""
        self.check_alive()
        time.sleep(POLL_SECONDS)

    def check_alive(self) -> None:
        """Raises ServiceEnded when a service has ended."""
        for service in self.services:
            code = service.process.poll()
            if code is not None:
                raise ServiceEnded(service.name, code)

    def wait(self) -> None:
        """Returns never: raises ServiceEnded when a service ends, Interrupted on a signal."""
        while True:
            self.check_alive()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Ends all services, the one started last first: the runner gives its blocks back before the books close.

        Requests have the grace time to finish. Another signal while we wait ends everything at once.
        """
        try:
            for service in reversed(self.services):
                _stop(service.process, self._grace_seconds + KILL_AFTER_SECONDS)
        except Interrupted:
            for service in self.services:
                service.process.kill()
                service.process.wait()
        self.services.clear()

    def _add(self, name: str, command: Sequence[str], address: str, stdout: int | None = None) -> Service:
        """Starts a child in a session of its own, so that Ctrl-C reaches it through us alone."""
        process = subprocess.Popen(command, stdout=stdout, start_new_session=True, preexec_fn=die_with_parent())
        service = Service(name, process, address)
        self.services.append(service)
        return service


def raise_on_signals() -> None:
    """Makes each SIGINT or SIGTERM raise Interrupted in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, interrupt)


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_serving(stub: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=1)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def die_with_parent() -> Callable[[], None] | None:
    """On Linux, a child whose parent is killed gets SIGTERM instead of going on unseen."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
