"""Octavo as its users run it: `octavo up`, and clients that stream over gRPC."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import torch
from octavo.kv.v1 import kv_manager_pb2 as kv_pb
from octavo.kv.v1 import kv_manager_pb2_grpc
from octavo.runner.v1 import model_runner_pb2 as runner_pb
from prometheus_client.parser import text_string_to_metric_families

from bench.serve.system import Run, timed_run
from bench.serve.workloads import Workload, warm_up
from services.channels import open_aio_channel
from services.client import AsyncClient, OctavoError
from services.metrics import octavo_version

BLOCK_SIZE = 16
START_SECONDS = 120
SAMPLE_SECONDS = 0.25
"""Between two looks at the pool's occupancy."""
_PHASES = "octavo_runner_step_phase_seconds_sum"


@dataclass(frozen=True, slots=True)
class Sample:
    """The pool at one moment, in slots of held blocks: all; with K/V by the books; for tokens that there are; spare.

    The newest token of an answer counts where its sequence has a slot for it: the step in flight writes it.
    """

    reserved: int
    stored: int
    known: int
    spare: int


async def create(options: dict[str, Any]) -> OctavoSystem:
    """Options: cache_tokens, and `arguments` for `octavo up`."""
    system = OctavoSystem(options["arguments"], options["cache_tokens"])
    try:
        await system.warm_up()
    except BaseException:
        await system.close()
        raise
    return system


class OctavoSystem:
    """Both services, on free ports of this machine."""

    def __init__(self, arguments: Sequence[str], cache_tokens: int) -> None:
        self.versions = {"octavo": octavo_version(), "torch": torch.__version__, "grpc": grpc.__version__}
        self._directory = tempfile.TemporaryDirectory(prefix="octavo-bench-")
        kv_address = f"unix:{self._directory.name}/kv.sock"
        address, self._metrics = (f"127.0.0.1:{_free_port()}" for _ in range(2))
        settings = {
            "kv-address": kv_address,
            "runner-address": address,
            "runner-metrics-address": self._metrics,
            "kv-metrics-address": "127.0.0.1:0",
        }
        if cache_tokens:
            settings["num-blocks"] = str(cache_tokens // BLOCK_SIZE + 1)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "up", *arguments, *(f"--{k}={v}" for k, v in settings.items())]
        )
        self._client = AsyncClient(address)
        self._kv_channel = open_aio_channel(kv_address)
        self._kv = kv_manager_pb2_grpc.KvManagerServiceStub(self._kv_channel)

    async def warm_up(self) -> None:
        """Waits until both serve, and answers a few requests. Raises RuntimeError when they do not start."""
        deadline = time.monotonic() + START_SECONDS
        while not await self._serves():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("octavo up does not start: see its message above")
            await asyncio.sleep(0.2)
        await timed_run(warm_up(), self._stream)

    async def run(self, workload: Workload) -> Run:
        await self._kv.ResetCache(kv_pb.ResetCacheRequest())
        before = await asyncio.to_thread(self._phase_seconds)
        samples: list[Sample] = []
        watch = asyncio.create_task(self._watch_pool(samples))
        try:
            run = await timed_run(workload, self._stream)
        finally:
            watch.cancel()
        after = await asyncio.to_thread(self._phase_seconds)
        phases = {phase: after[phase] - before.get(phase, 0.0) for phase in after}
        extra = {"overhead_share": 1 - phases["forward"] / sum(phases.values()), **useful_shares(samples)}
        return replace(run, extra=extra | {f"{phase}_seconds": seconds for phase, seconds in phases.items()})

    async def close(self) -> None:
        with suppress(grpc.RpcError):
            await self._client.close()
            await self._kv_channel.close()
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._directory.cleanup()

    async def _stream(self, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Sequence[int]]:
        async for chunk in self._client.generate(prompt, max_tokens=max_tokens, ignore_eos=True):
            yield chunk.token_ids

    async def _serves(self) -> bool:
        try:
            async for _ in self._client.generate([1], max_tokens=1):
                pass
        except OctavoError:
            return False
        return True

    async def _watch_pool(self, samples: list[Sample]) -> None:
        while True:
            # The answers are some milliseconds apart.
            requests = await self._client.requests()
            listed = await self._kv.ListSequences(kv_pb.ListSequencesRequest(page_size=1000))
            occupancy = (await self._kv.GetPool(kv_pb.GetPoolRequest())).occupancy
            room = {each.sequence_id: each.num_blocks * BLOCK_SIZE for each in listed.sequences}
            known = sum(tokens_with_slots(each, room) for each in requests)
            reserved = occupancy.reserved_tokens
            spare = occupancy.leased_blocks * BLOCK_SIZE
            samples.append(Sample(reserved, occupancy.stored_tokens, min(known, reserved), spare))
            await asyncio.sleep(SAMPLE_SECONDS)

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds of all engine steps so far, by phase."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics") as answer:
            text = answer.read().decode()
        return {
            sample.labels["phase"]: sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == _PHASES
        }


def useful_shares(samples: Sequence[Sample]) -> dict[str, float]:
    """Shares of the slots of held blocks over time, by name; nothing where no block was held.

    useful_share: slots for tokens that there are, whether computed yet or not. spare_share: those of spare blocks.
    stored_share: those with K/V by the books, which are told once a block, and so know up to a block less of each
    sequence than there is.
    """
    reserved = sum(each.reserved for each in samples)
    if not reserved:
        return {}
    return {
        "useful_share": sum(each.known for each in samples) / reserved,
        "spare_share": sum(each.spare for each in samples) / reserved,
        "stored_share": sum(each.stored for each in samples) / reserved,
    }


def tokens_with_slots(request: runner_pb.RequestInfo, room: Mapping[str, int]) -> int:
    """Of a request of one choice: its tokens, as far as there is room for them. room: slots by sequence."""
    return sum(min(request.prompt_tokens + request.output_tokens, room.get(each, 0)) for each in request.sequence_ids)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
