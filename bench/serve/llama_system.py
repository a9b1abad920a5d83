"""llama.cpp's server, over its local HTTP. Standard library only."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.serve.system import Run, timed_run
from bench.serve.workloads import MAX_MODEL_LEN, Workload, warm_up

SLOTS = 16
"""Sequences at a time in a cache of full size; each has MAX_MODEL_LEN tokens of it for itself."""
START_SECONDS = 60
CALL_SECONDS = 900
MAX_CALLS = 256
UNTOLD_TOKEN = 0


async def create(options: dict[str, Any]) -> LlamaSystem:
    """Options: server (the program), model (a GGUF file), cache_tokens."""
    slots = options["cache_tokens"] // MAX_MODEL_LEN or SLOTS
    return LlamaSystem(options["server"], options["model"], slots)


class LlamaSystem:
    """A new server for each run: this one cannot be told to forget its cache."""

    def __init__(self, program: str, model: str, slots: int) -> None:
        self.versions = {"llama.cpp": _version(program)}
        threads = str(os.cpu_count() or 1)
        self._command = [program, "-m", model, "-np", str(slots), "-c", str(slots * MAX_MODEL_LEN)]
        self._command += ["-t", threads, "-tb", threads, "--no-webui", "--host", "127.0.0.1"]
        self._port = 0
        self._pool = ThreadPoolExecutor(MAX_CALLS)

    async def run(self, workload: Workload) -> Run:
        self._port = _free_port()
        process = subprocess.Popen([*self._command, "--port", str(self._port)])
        try:
            await self._wait(process)
            await timed_run(warm_up(), self._stream)
            return await timed_run(workload, self._stream)
        finally:
            process.terminate()
            process.wait()

    async def close(self) -> None:
        self._pool.shutdown()

    async def _stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Sequence[int]]:
        queue: asyncio.Queue[Sequence[int] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                for token_ids in self._complete(prompt, max_tokens):
                    loop.call_soon_threadsafe(queue.put_nowait, token_ids)
            finally:
                loop.call_soon_threadsafe(queue.put_nowait, None)

        called = loop.run_in_executor(self._pool, call)
        while (token_ids := await queue.get()) is not None:
            yield token_ids
        await called

    def _complete(self, prompt: Sequence[int], max_tokens: int) -> Iterator[Sequence[int]]:
        """The tokens of one answer, as they come. Raises RuntimeError with what the server says."""
        body = {
            "prompt": list(prompt),
            "n_predict": max_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=CALL_SECONDS)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(answer.read().decode())
            yield from _tokens(json.loads(line[5:]) for line in answer if line.startswith(b"data:"))
        finally:
            connection.close()

    async def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(self._is_healthy):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("llama-server does not start: see its message above")
            await asyncio.sleep(0.2)

    def _is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def _tokens(events: Iterable[dict[str, Any]]) -> Iterator[Sequence[int]]:
    """What each event brings. A token that ends inside a character is counted later and never told: it stands as 0."""
    given = 0
    for event in events:
        untold = max(0, event["tokens_predicted"] - given - len(event["tokens"]))
        token_ids = [UNTOLD_TOKEN] * untold + event["tokens"]
        given += len(token_ids)
        yield token_ids


def _version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return next((line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version")), "unknown")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
