"""Takes a model runner out of service while its process lives: RunnerAdminService, and what SIGTERM shares with it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import grpc
import structlog
from octavo.runner.v1 import runner_admin_pb2 as pb
from octavo.runner.v1 import runner_admin_pb2_grpc

from model_runner.invalid import InvalidRequest
from services.health import Health
from services.runner_wire import write_seconds
from services.traffic import Traffic

MAX_LAME_DUCK_SECONDS = 3_600
MAX_DRAIN_SECONDS = 86_400

log = structlog.get_logger()


class Drainer(runner_admin_pb2_grpc.RunnerAdminServiceServicer):
    """Says NOT_SERVING, and some time later takes no new requests. Belongs to the event loop."""

    def __init__(self, traffic: Traffic, health: Health) -> None:
        self._traffic = traffic
        self._health = health
        self._stopping = asyncio.Event()
        self._lame_duck: asyncio.Task[None] | None = None

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        _check_seconds("lame_duck_seconds", request.lame_duck_seconds, MAX_LAME_DUCK_SECONDS)
        _check_seconds("drain_seconds", request.drain_seconds, MAX_DRAIN_SECONDS)
        started, ended_before = time.monotonic(), self._traffic.ended
        if self._lame_duck is None:
            log.info(
                "model-runner drains",
                lame_duck_seconds=request.lame_duck_seconds,
                drain_seconds=request.drain_seconds,
                requests=self._traffic.in_progress,
            )
            self._lame_duck = asyncio.create_task(self._take_out(request.lame_duck_seconds))
        # Who waits for it may leave; the drain goes on.
        await asyncio.shield(self._lame_duck)
        await self._traffic.wait_idle(request.drain_seconds)
        return pb.DrainResponse(
            finished_requests=self._traffic.ended - ended_before,
            remaining_requests=self._traffic.in_progress,
            elapsed=write_seconds(time.monotonic() - started),
        )

    async def stop(self) -> None:
        """Says NOT_SERVING, ends the watches of health, and takes no new requests from now on."""
        self._take_no_more()
        await self._health.stop()

    async def _take_out(self, lame_duck_seconds: float) -> None:
        await self._health.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), lame_duck_seconds)
        self._take_no_more()

    def _take_no_more(self) -> None:
        self._traffic.stopping = True
        self._stopping.set()


def _check_seconds(field: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise InvalidRequest(field, f"{field} is {value:g}; give 0 to {most:,} seconds.")
