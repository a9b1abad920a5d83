"""The KV manager as a process: binds, serves, and stops when it is told to."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import structlog
from octavo.kv.v1 import kv_manager_pb2_grpc

from kvmanager.manager import KvManager
from services.config import KvManagerSettings
from services.errors import KV_DOMAIN, StartupError, kv_failure
from services.grpc_server import (
    KV_MAX_RECEIVE_BYTES,
    bind,
    create_server,
    enable_reflection,
    stop_gracefully,
)
from services.health import Health
from services.kv_metrics import BooksCollector, pool_readings
from services.kv_service import KV_SERVICE_NAME, KvManagerServicer
from services.metrics import MetricsServer, new_registry, octavo_version, on_loop, start_metrics_server
from services.rpc_interceptor import RpcInterceptor
from services.signals import stop_signal


@dataclass(frozen=True, slots=True)
class RunningKvManager:
    """A KV manager that serves: its books, and where it is reached."""

    manager: KvManager
    address: str
    metrics_address: str
    server: grpc.aio.Server
    health: Health
    metrics: MetricsServer

    async def stop(self, grace_seconds: float) -> None:
        """Says NOT_SERVING, lets calls end for `grace_seconds`, and frees the ports."""
        await stop_gracefully(self.server, self.health, grace_seconds)
        await asyncio.to_thread(self.metrics.close)


async def start_kv_manager(settings: KvManagerSettings) -> RunningKvManager:
    """Binds and serves on the running event loop. Raises StartupError."""
    manager = KvManager(uuid.uuid4().hex, epoch_base=int(time.time()))
    registry = new_registry("kv-manager")
    read = on_loop(asyncio.get_running_loop(), lambda: pool_readings(manager))
    registry.register(BooksCollector(read))
    server = create_server(KV_MAX_RECEIVE_BYTES, [RpcInterceptor(registry, kv_failure, KV_DOMAIN)])
    kv_manager_pb2_grpc.add_KvManagerServiceServicer_to_server(KvManagerServicer(manager), server)
    enable_reflection(server, [KV_SERVICE_NAME])
    health = Health(server, [KV_SERVICE_NAME])
    address = bind(server, settings.kv_address, settings.server_tls())
    await server.start()
    try:
        explicit = "kv_metrics_address" in settings.model_fields_set
        metrics = start_metrics_server(registry, settings.kv_metrics_address, explicit=explicit)
    except StartupError:
        # Frees the port, and removes the socket file.
        await server.stop(None)
        raise
    await health.set_ready(True)
    return RunningKvManager(manager, address, metrics.address, server, health, metrics)


async def serve_kv_manager(
    settings: KvManagerSettings, on_serving: Callable[[RunningKvManager], None] | None = None
) -> None:
    """Serves until SIGTERM or SIGINT; `on_serving` is called once it does. Raises StartupError."""
    log = structlog.get_logger()
    with stop_signal() as stopped:
        running = await start_kv_manager(settings)
        log.info(
            "kv-manager serves",
            address=running.address,
            metrics=f"http://{running.metrics_address}/metrics",
            boot_id=running.manager.boot_id,
            tls=settings.server_tls() is not None,
            version=octavo_version(),
        )
        if on_serving is not None:
            on_serving(running)
        await stopped.wait()
        log.info("kv-manager stops", grace_seconds=settings.grace_seconds)
        await running.stop(settings.grace_seconds)
