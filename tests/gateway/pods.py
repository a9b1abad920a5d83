"""Two pods, each a runner with a KV manager of its own, and smg in front of them, as real processes."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai

from services.gateway import gateway_command, openai_url, why_not_ready
from tests.e2e.stack import PATIENCE_SECONDS, SERVING, Stack, free_port, health_of, wait_until

MODEL = "SmolLM2-135M-Instruct"


class Pods:
    """The stacks, and the gateway's client and metrics."""

    def __init__(self, directory: Path) -> None:
        self.stacks = []
        for name in ("a", "b"):
            (directory / name).mkdir()
            # One thread each: the two share the cores with whatever else is tested.
            stack = Stack(directory / name, "--num-blocks=1024", "--num-threads=1", "--vllm-metric-names")
            # A gateway reaches runners by TCP alone.
            stack.runner_address = f"127.0.0.1:{free_port()}"
            self.stacks.append(stack)
        self.address = f"127.0.0.1:{free_port()}"
        self._metrics = f"127.0.0.1:{free_port()}"
        self._log = directory / "smg.log"
        self._gateway: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        for stack in self.stacks:
            stack.start_manager()
            stack.start_runner()
        for stack in self.stacks:
            wait_until("serving", lambda stack=stack: health_of(stack.runner_address) == SERVING, stack.runner)
        command = gateway_command(self.address, self._metrics, [stack.runner_address for stack in self.stacks], 1)
        with self._log.open("wb") as log:
            self._gateway = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        wait_until("the gateway's start", lambda: not why_not_ready(self.address))
        wait_until("both pods", lambda: self.healthy() == 2)

    def stop(self) -> None:
        if self._gateway is not None:
            self._gateway.terminate()
            self._gateway.wait(PATIENCE_SECONDS)
        for stack in self.stacks:
            stack.stop()

    def client(self) -> openai.OpenAI:
        """Sends nothing twice by itself."""
        return openai.OpenAI(base_url=openai_url(self.address), api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)

    def healthy(self) -> int:
        """Pods that the gateway sends requests to."""
        found = re.search(r'"healthy_workers":(\d+)', self._get(f"http://{self.address}/readiness"))
        return int(found[1]) if found else 0

    def indexed_blocks(self) -> int:
        """Blocks of all pods that the gateway knows to be cached."""
        samples = re.findall(r"^smg_kv_index_blocks\{.*\} (\d+)", self._get(f"http://{self._metrics}/metrics"), re.M)
        return sum(map(int, samples))

    def decisions(self) -> list[str]:
        """How the gateway has routed, for when a test must say why."""
        text = self._get(f"http://{self._metrics}/metrics")
        return re.findall(r"^smg_(?:cache_aware|worker)_\w+\{.*\} [1-9].*", text, re.M)

    def cached_blocks(self) -> int:
        """Blocks of all pods that can be found."""
        return sum(int(stack.pool().occupancy.cached_blocks) for stack in self.stacks)

    def wait_for_events(self) -> None:
        """Returns once the gateway knows what is cached."""
        wait_until("the gateway's index", lambda: self.indexed_blocks() == self.cached_blocks())

    def _get(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return str(answer.read().decode())


@contextmanager
def running_pods(directory: Path) -> Iterator[Pods]:
    pods = Pods(directory)
    try:
        pods.start()
        yield pods
    finally:
        pods.stop()
