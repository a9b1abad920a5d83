"""The model runner as a process: binds, loads the model, waits for its KV manager, serves, and stops when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc
import structlog
from octavo.runner.v1 import model_runner_pb2_grpc
from prometheus_client import CollectorRegistry

from model_runner.engine import Engine
from model_runner.engine_types import EngineState
from services.books_client import GrpcBooks
from services.config import ModelRunnerSettings
from services.errors import RUNNER_DOMAIN, StartupError
from services.grpc_server import RUNNER_MAX_RECEIVE_BYTES, bind, create_server, enable_reflection, stop_gracefully
from services.health import Health
from services.metrics import MetricsServer, new_registry, octavo_version, start_metrics_server
from services.model_setup import Setup, set_up_model
from services.rpc_interceptor import RpcInterceptor
from services.runner_errors import runner_failure
from services.runner_metrics import RunnerMetrics
from services.runner_service import RUNNER_SERVICE_NAME, ModelRunnerServicer, ServedModel
from services.signals import stop_signal
from services.streams import Streams

log = structlog.get_logger()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Front:
    """What clients reach from the start: it answers health, and NOT_READY to everything else until it is served."""

    address: str
    server: grpc.aio.Server
    health: Health
    registry: CollectorRegistry
    metrics: MetricsServer
    streams: Streams
    servicer: ModelRunnerServicer


class _Readiness:
    """Turns the engine's changes of state into health and log lines, on the event loop."""

    def __init__(self, front: _Front, kv_address: str) -> None:
        self._front = front
        self._kv_address = kv_address
        self._loop = asyncio.get_running_loop()
        self._served = False
        self.refused: asyncio.Future[str] = self._loop.create_future()
        """Resolves with the KV manager's sentence when it refuses us before we ever served, or our pool is taken."""

    def listen(self, state: EngineState, sentence: str) -> None:
        """Called from the engine's thread."""
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._change(state, sentence)))

    async def _change(self, state: EngineState, sentence: str) -> None:
        self._front.servicer.waits_for = f"the KV manager at {self._kv_address}"
        await self._front.health.set_ready(state is EngineState.SERVING)
        match state:
            case EngineState.SERVING:
                self._served = True
                log.info("model-runner serves", address=self._front.address, kv_manager=self._kv_address)
            case EngineState.TAKEN:
                self._end(sentence)
            case EngineState.REFUSED if not self._served:
                self._end(sentence)
            case EngineState.WAITING_FOR_BOOKS | EngineState.REFUSED:
                log.warning("waiting for the KV manager", kv_manager=self._kv_address, reason=sentence)

    def _end(self, sentence: str) -> None:
        if not self.refused.done():
            self.refused.set_result(sentence)


async def serve_model_runner(settings: ModelRunnerSettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartupError."""
    with stop_signal() as stopped:
        front = await _open_front(settings)
        try:
            await _serve(settings, front, stopped)
        finally:
            await asyncio.to_thread(front.metrics.close)


async def _serve(settings: ModelRunnerSettings, front: _Front, stopped: asyncio.Event) -> None:
    try:
        setup = await _unless_stopped(asyncio.to_thread(set_up_model, settings), stopped)
    except StartupError:
        await front.server.stop(None)
        raise
    if setup is None:
        await stop_gracefully(front.server, front.health, 0)
        return
    readiness = _Readiness(front, settings.kv_address)
    engine = _create_engine(settings, front, setup, readiness.listen)
    front.servicer.waits_for = f"the KV manager at {settings.kv_address}"
    front.servicer.served = ServedModel(engine, setup.tokenizer, setup.limits, setup.describe(settings.pool_id))
    log.info("waiting for the KV manager", kv_manager=settings.kv_address)
    engine.start()
    try:
        refusal = await _unless_stopped(readiness.refused, stopped)
        if refusal is not None:
            raise StartupError(f"The KV manager at {settings.kv_address} refuses this runner's pool: {refusal}.")
        log.info("model-runner stops", grace_seconds=settings.grace_seconds)
        await stop_gracefully(front.server, front.health, settings.grace_seconds)
    finally:
        await asyncio.to_thread(engine.stop)
        await front.server.stop(None)


async def _open_front(settings: ModelRunnerSettings) -> _Front:
    """Binds and answers before the model is there, so that probes and clients learn what is going on."""
    registry = new_registry("model-runner")
    server = create_server(RUNNER_MAX_RECEIVE_BYTES, [RpcInterceptor(registry, runner_failure, RUNNER_DOMAIN)])
    streams = Streams(asyncio.get_running_loop())
    servicer = ModelRunnerServicer(streams)
    model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(servicer, server)
    enable_reflection(server, [RUNNER_SERVICE_NAME])
    health = Health(server, [RUNNER_SERVICE_NAME])
    address = bind(server, settings.runner_address, settings.server_tls())
    await server.start()
    try:
        explicit = "runner_metrics_address" in settings.model_fields_set
        metrics = start_metrics_server(registry, settings.runner_metrics_address, explicit=explicit)
    except StartupError:
        await server.stop(None)
        raise
    log.info(
        "model-runner starts",
        address=address,
        metrics=f"http://{metrics.address}/metrics",
        tls=settings.server_tls() is not None,
        version=octavo_version(),
    )
    return _Front(address, server, health, registry, metrics, streams, servicer)


def _create_engine(
    settings: ModelRunnerSettings, front: _Front, setup: Setup, listen: Callable[[EngineState, str], None]
) -> Engine:
    books = GrpcBooks(settings.kv_address, pool_id=settings.pool_id, tls=settings.kv_tls())
    metrics = RunnerMetrics(front.registry, running=lambda: engine.counts()[0], waiting=lambda: engine.counts()[1])
    engine = Engine(setup.executor, books, setup.tokenizer, setup.options, front.streams.deliver, listen, metrics)
    return engine


async def _unless_stopped(work: Awaitable[T], stopped: asyncio.Event) -> T | None:
    """The result of `work`; None when the process is told to stop before it is there."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    return task.result() if task.done() else None
