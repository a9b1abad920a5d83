"""Real KV managers for the tests of the services: on a thread with an event loop, or as processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from octavo.kv.v1 import kv_manager_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from services.channels import open_channel
from services.config import KvManagerSettings, load_settings
from services.kv_process import RunningKvManager, start_kv_manager

WAIT_SECONDS = 60
COMMANDS = """
import typer
from services.cli_kv import add_kv_commands
app = typer.Typer(pretty_exceptions_enable=False)
add_kv_commands(app)
app()
"""


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_SECONDS)

    def catch_up(self) -> None:
        """Returns when what the loop is at is done: a session's answer goes out before all is written down."""
        self.run(asyncio.sleep(0))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(WAIT_SECONDS)
        self.loop.close()


def kv_settings(directory: Path, **given: Any) -> KvManagerSettings:
    """Settings of a KV manager with its socket in `directory` and its metrics on a free port."""
    defaults = {"kv_address": f"unix:{directory}/kv.sock", "kv_metrics_address": "127.0.0.1:0"}
    return load_settings(KvManagerSettings, defaults | given)


@contextmanager
def running_kv_manager(settings: KvManagerSettings) -> Iterator[RunningKvManager]:
    """A KV manager that serves while the block runs."""
    with kv_manager_on_a_thread(settings) as (running, _):
        yield running


@contextmanager
def kv_manager_on_a_thread(settings: KvManagerSettings) -> Iterator[tuple[RunningKvManager, LoopThread]]:
    """The same, and the thread that it serves on: who looks into its books lets that catch up first."""
    thread = LoopThread()
    try:
        running = thread.run(start_kv_manager(settings))
        try:
            yield running, thread
        finally:
            thread.run(running.stop(1))
    finally:
        thread.close()


@contextmanager
def kv_stub(address: str) -> Iterator[kv_manager_pb2_grpc.KvManagerServiceStub]:
    """A blocking stub."""
    with open_channel(address) as channel:
        yield kv_manager_pb2_grpc.KvManagerServiceStub(channel)


def scrape(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples at an endpoint, by name and sorted labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_SECONDS) as answer:
        return samples(answer.read().decode())


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples of a Prometheus text, by name and sorted labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def command(*arguments: str) -> list[str]:
    """The command line of a KV manager's command."""
    return [sys.executable, "-c", COMMANDS, *arguments]


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without Octavo's settings."""
    return {key: value for key, value in os.environ.items() if not key.startswith("OCTAVO_")} | more


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=clean_environment(**environment),
        check=False,
    )


@contextmanager
def kv_process(directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A KV manager in a process of its own, once it serves."""
    address = f"unix:{directory}/kv.sock"
    process = subprocess.Popen(
        command("kv-manager", "--kv-address", address, "--kv-metrics-address", "127.0.0.1:0"), env=clean_environment()
    )
    try:
        with open_channel(address) as channel:
            grpc.channel_ready_future(channel).result(WAIT_SECONDS)
        yield process, address
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
