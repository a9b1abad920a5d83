"""The KV manager as a process: binds, serves, and stops when it is told to."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import structlog
from octavo.kv.v1 import kv_manager_pb2_grpc

from kvmanager.manager import KvManager
from services.config import KvManagerSettings
from services.endpoint import Endpoint, ServiceKind, open_endpoint
from services.errors import KV_DOMAIN, StartupError, kv_failure
from services.grpc_server import KV_MAX_RECEIVE_BYTES
from services.health import Health
from services.kv_metrics import BooksCollector, pool_readings
from services.kv_service import KV_SERVICE_NAME, KvManagerServicer
from services.metrics import new_registry, octavo_version, on_loop
from services.presence import HEALTH_PREFIX, Presence
from services.rpc_interceptor import Verb
from services.session_metrics import SessionCollector, step_histogram
from services.session_socket import SessionSocket, bind_session_socket, max_message_bytes
from services.session_streams import SessionStreams
from services.short_slices import ask_for_short_slices
from services.signals import stop_signal

_COLLECT_AFTER = (50_000, 20, 20)
"""Objects made before garbage is looked for, and how much more seldom it is among the older ones. The books have no
cycles, so there is little to find, and a look at all of a large pool's takes a tenth of a second."""

KIND = ServiceKind(
    KV_SERVICE_NAME,
    KV_DOMAIN,
    kv_failure,
    KV_MAX_RECEIVE_BYTES,
    "kv_address",
    "kv_metrics_address",
    "kv_health_address",
)


@dataclass(frozen=True, slots=True)
class RunningKvManager:
    """A KV manager that serves: its books, and where it is reached."""

    manager: KvManager
    sessions: SessionStreams
    endpoint: Endpoint
    session_socket: SessionSocket | None

    @property
    def address(self) -> str:
        return self.endpoint.address

    @property
    def metrics_address(self) -> str:
        return self.endpoint.metrics_address

    async def stop(self, grace_seconds: float) -> None:
        """Says NOT_SERVING, lets runners and other calls end for `grace_seconds`, and frees the ports."""
        started = time.monotonic()
        await self.endpoint.health.stop()
        await self.sessions.drain(grace_seconds)
        if self.session_socket is not None:
            await self.session_socket.stop()
        await self.endpoint.stop(max(0.0, grace_seconds - (time.monotonic() - started)))


async def start_kv_manager(settings: KvManagerSettings) -> RunningKvManager:
    """Binds and serves on the running event loop. Raises StartupError."""
    # Milliseconds since 1970: a later process starts with a higher epoch than any that an earlier one gave out, even
    # when it starts at once.
    manager = KvManager(uuid.uuid4().hex, epoch_base=time.time_ns() // 1_000_000, clock=time.monotonic)
    registry = new_registry("kv-manager")
    sessions = SessionStreams(manager, settings.session_silence_seconds, step_histogram(registry).observe)
    read = on_loop(asyncio.get_running_loop(), lambda: pool_readings(manager, sessions.session_of))
    registry.register(BooksCollector(read))
    registry.register(SessionCollector(sessions))
    servicer = KvManagerServicer(manager, sessions)
    add_servicer = partial(kv_manager_pb2_grpc.add_KvManagerServiceServicer_to_server, servicer)
    session_socket = bind_session_socket(settings)
    try:
        endpoint = await open_endpoint(KIND, settings, registry, add_servicer)
    except StartupError:
        if session_socket is not None:
            session_socket.close()
        raise
    if session_socket is not None:
        observe = partial(endpoint.calls.observe, Verb(KV_SERVICE_NAME, "Session"))
        await session_socket.serve(sessions, max_message_bytes(settings), observe)
    sessions.listen(_SessionHealth(endpoint.health).tell)
    await endpoint.health.set_ready(True)
    return RunningKvManager(manager, sessions, endpoint, session_socket)


class _SessionHealth:
    """Gives each pool's session a health status of its own: SERVING while it is connected."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, pool_id: str, presence: Presence | None) -> None:
        """Takes news of a session; None when the pool is gone, and the name goes with it."""
        well = None if presence is None else presence is Presence.CONNECTED
        task = asyncio.create_task(self._health.tell(HEALTH_PREFIX + pool_id, well))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)


async def serve_kv_manager(
    settings: KvManagerSettings, on_serving: Callable[[RunningKvManager], None] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT; `on_serving` is called once it does. Raises StartupError."""
    log = structlog.get_logger()
    ask_for_short_slices()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
    with stop_signal() as stopped:
        running = await start_kv_manager(settings)
        log.info(
            "kv-manager serves",
            address=running.address,
            metrics=f"http://{running.metrics_address}/metrics",
            sessions="gRPC" if running.session_socket is None else f"{running.session_socket.address} or gRPC",
        )
        log.debug("kv-manager facts", boot_id=running.manager.boot_id, version=octavo_version())
        if on_serving is not None:
            on_serving(running)
        await stopped.wait()
        log.info(
            "kv-manager stops",
            waits_for_runners=len(running.sessions),
            grace_seconds=settings.grace_seconds,
        )
        await running.stop(settings.grace_seconds)
