"""The model runner as a process: binds, loads the model, waits for its KV manager, serves, and stops when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.runner.v1 import model_runner_pb2_grpc, runner_admin_pb2_grpc
from prometheus_client import CollectorRegistry

from model_runner.engine import Engine
from model_runner.engine_types import EngineState
from services.answering import Answering, ServedModel
from services.authentication import open_guards, open_stand_ins
from services.books_metrics import BooksMetrics
from services.channels import ClientTls, check_tls, open_aio_channel
from services.config import ModelRunnerSettings
from services.connection_faults import tls_fault
from services.draining import Drainer
from services.endpoint import LAST_WORDS_SECONDS, Endpoint, ServiceKind, open_endpoint
from services.errors import RUNNER_DOMAIN, StartupError, describe_rpc_error
from services.grpc_server import RUNNER_MAX_RECEIVE_BYTES
from services.load_meter import LoadMeter, Observers
from services.metrics import new_registry
from services.model_setup import Setup, set_up_model
from services.runner_errors import runner_failure
from services.runner_metrics import RunnerMetrics
from services.runner_service import RUNNER_SERVICE_NAME, ModelRunnerServicer
from services.session.dial import SessionDial
from services.session_books import SessionBooks
from services.signals import stop_signal
from services.streams import Streams
from services.vllm_choice import choose_vllm, is_at_runner_address
from services.vllm_metrics import VllmMetricNames

if TYPE_CHECKING:
    from services.vllm_side import VllmSide

KIND = ServiceKind(
    RUNNER_SERVICE_NAME,
    RUNNER_DOMAIN,
    runner_failure,
    RUNNER_MAX_RECEIVE_BYTES,
    "runner_address",
    "runner_metrics_address",
    "runner_health_address",
)

LATE_SECONDS = 1.0
"""A KV manager that is there answers sooner."""
ASK_SECONDS = 5.0
"""For a call that finds out what is wrong."""

log = structlog.get_logger()

T = TypeVar("T")


class _Readiness:
    """Turns the engine's changes of state into health and log lines, on the event loop."""

    def __init__(self, endpoint: Endpoint, answering: Answering, settings: ModelRunnerSettings) -> None:
        self._endpoint = endpoint
        self._kv_address = kv_address = settings.kv_address
        self._kv_tls = settings.kv_tls()
        self._loop = asyncio.get_running_loop()
        self._served = False
        answering.waits_for = f"the KV manager at {kv_address}"
        self.refused: asyncio.Future[str] = self._loop.create_future()
        """Resolves with the KV manager's sentence when it refuses us before we ever served, or our pool is taken."""

    def listen(self, state: EngineState, sentence: str) -> None:
        """Called from the engine's thread."""
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._change(state, sentence)))

    async def _change(self, state: EngineState, sentence: str) -> None:
        await self._endpoint.health.set_ready(state is EngineState.SERVING)
        match state:
            case EngineState.SERVING:
                self._served = True
                log.info("model-runner serves", address=self._endpoint.address, kv_manager=self._kv_address)
            case EngineState.TAKEN:
                self._end(f"another runner has opened it; give each runner a pool of its own by --pool ({sentence})")
            case EngineState.REFUSED if not self._served:
                self._end(sentence)
            case EngineState.WAITING_FOR_BOOKS | EngineState.REFUSED:
                log.warning("waiting for the KV manager", kv_manager=self._kv_address, reason=sentence)

    def warn_if_late(self) -> None:
        """Says what the runner waits for, unless it serves in a moment."""
        self._loop.call_later(LATE_SECONDS, self._warn_unless_served)

    def _warn_unless_served(self) -> None:
        if not self._served:
            self._asking = asyncio.ensure_future(self._warn())

    async def _warn(self) -> None:
        """The session waits for a connection and never learns why there is none; a call that does not wait does."""
        fault = await _tls_fault(self._kv_address, self._kv_tls)
        if self._served:
            return
        if fault is not None:
            log.warning("cannot reach the KV manager", kv_manager=self._kv_address, reason=fault)
            return
        hint = f"octavo kv-manager --kv-address {self._kv_address}"
        log.warning("waiting for the KV manager", kv_manager=self._kv_address, start_it_with=hint)

    def _end(self, sentence: str) -> None:
        if not self.refused.done():
            self.refused.set_result(sentence)


async def _tls_fault(address: str, tls: ClientTls | None) -> str | None:
    """What TLS has against a connection; None when it is something else, or nothing."""
    try:
        async with open_aio_channel(address, tls) as channel:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ASK_SECONDS)
    except StartupError as error:
        return str(error)
    except grpc.RpcError as error:
        return tls_fault(describe_rpc_error(error).sentence)
    return None


async def serve_model_runner(settings: ModelRunnerSettings) -> None:
    """Serves until SIGTERM or SIGINT. Raises StartupError.

    The endpoint is open from the start, so that probes and clients learn what is going on while the model loads.
    """
    check_tls(settings.kv_tls())
    with stop_signal() as stopped:
        registry = new_registry("model-runner")
        streams = Streams(asyncio.get_running_loop(), settings.max_unread_tokens)
        answering = Answering(streams, settings.slow_reader_seconds)
        vllm = choose_vllm(settings, answering)
        beside = vllm if is_at_runner_address(settings) else None
        kind = KIND if beside is None else replace(KIND, also=(beside.name,))
        guards = open_guards(settings, beside.open_methods if beside is not None else ())
        endpoint = await open_endpoint(kind, settings, registry, partial(_add_services, answering, beside), guards)
        log.info(
            "model-runner starts",
            address=endpoint.address,
            metrics=f"http://{endpoint.metrics_address}/metrics",
        )
        drainer = Drainer(answering.traffic, endpoint.health)
        grace_seconds = 0.0
        try:
            await open_admin(endpoint, drainer, settings)
            if vllm is not None and settings.vllm_address is not None:
                await _open_for_gateways(endpoint, vllm, settings, open_stand_ins(settings, guards))
            setup = await _unless_stopped(asyncio.to_thread(set_up_model, settings, stopped.is_set), stopped)
            if setup is not None:
                await _serve(settings, setup, endpoint, answering, vllm, registry, stopped)
                grace_seconds = settings.grace_seconds
        finally:
            await _stop(endpoint, answering, drainer, grace_seconds)
            if vllm is not None:
                await vllm.close()


async def _open_for_gateways(
    endpoint: Endpoint, vllm: VllmSide, settings: ModelRunnerSettings, guards: Sequence[grpc.aio.ServerInterceptor]
) -> None:
    """Serves VllmEngine at an address of its own. Raises StartupError."""
    bound = await endpoint.serve_also(
        str(settings.vllm_address), vllm.add_to, guards, RUNNER_MAX_RECEIVE_BYTES, settings.limits()
    )
    log.info("VllmEngine is served without TLS and tokens", address=bound, tenant=settings.vllm_tenant)


def _add_services(answering: Answering, vllm: VllmSide | None, server: grpc.aio.Server) -> None:
    model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(ModelRunnerServicer(answering), server)
    if vllm is not None:
        vllm.add_to(server)


async def open_admin(endpoint: Endpoint, drainer: Drainer, settings: ModelRunnerSettings) -> None:
    """Serves the admin service beside the endpoint, if the settings want it. Raises StartupError."""
    if settings.runner_admin_address is not None:
        add = partial(runner_admin_pb2_grpc.add_RunnerAdminServiceServicer_to_server, drainer)
        await endpoint.serve_also(settings.runner_admin_address, add)


async def _stop(endpoint: Endpoint, answering: Answering, drainer: Drainer, grace_seconds: float) -> None:
    """Takes no new requests, lets those that it has end for `grace_seconds`, and then ends them."""
    await drainer.stop()
    await answering.traffic.wait_idle(grace_seconds)
    if answering.served is not None:
        await asyncio.to_thread(answering.served.engine.stop)
        await asyncio.to_thread(answering.served.forms.close)
    # Those that were ended have a status on its way.
    await endpoint.stop(LAST_WORDS_SECONDS)


async def _serve(
    settings: ModelRunnerSettings,
    setup: Setup,
    endpoint: Endpoint,
    answering: Answering,
    vllm: VllmSide | None,
    registry: CollectorRegistry,
    stopped: asyncio.Event,
) -> None:
    """Runs the engine until the process is told to stop. Raises StartupError when the KV manager refuses us."""
    readiness = _Readiness(endpoint, answering, settings)
    books = SessionBooks(
        SessionDial(settings.kv_address, settings.kv_tls()),
        pool_id=settings.pool_id,
        cache=settings.cache_options(),
        lease_blocks=settings.lease_of(setup.options.facts.num_blocks),
        watch=BooksMetrics(registry, lambda: books.status()),
    )
    metrics = RunnerMetrics(registry, running=lambda: engine.counts()[0], waiting=lambda: engine.counts()[1])
    meter = LoadMeter()
    observer = metrics if vllm is None else Observers(metrics, meter)
    engine = Engine(
        setup.executor,
        books,
        setup.tokenizer,
        setup.options,
        answering.streams.deliver,
        readiness.listen,
        observer,
        setup.steps(),
    )
    facts = setup.describe(settings.pool_id)
    if settings.vllm_metric_names:
        VllmMetricNames(
            registry, facts.model, facts.block_size, facts.num_blocks - 1, engine.counts, lambda: books.held_blocks
        )
    answering.served = ServedModel(engine, setup.tokenizer, setup.limits, facts, setup.form_compiler())
    if vllm is not None:
        vllm.begin(settings, setup, engine, books, meter)
    engine.start()
    readiness.warn_if_late()
    refusal = await _unless_stopped(readiness.refused, stopped)
    if refusal is not None:
        raise StartupError(f"The KV manager at {settings.kv_address} refuses this runner's pool: {refusal}.")
    log.info("model-runner stops", grace_seconds=settings.grace_seconds)


async def _unless_stopped(work: Awaitable[T], stopped: asyncio.Event) -> T | None:
    """The result of `work`; None when the process is told to stop before it is there."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(stopped.wait())
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        return task.result()
    # Whatever comes of it, nobody waits for it any more.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return None
