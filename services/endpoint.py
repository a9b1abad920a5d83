"""Where a process is reached: its gRPC server with health and reflection, and its metrics, opened and closed as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry

from services.config import ProcessSettings
from services.errors import ErrorMapping, StartupError
from services.grpc_server import bind, create_server, enable_reflection, stop_gracefully
from services.health import Health
from services.metrics import MetricsServer, start_metrics_server
from services.rpc_interceptor import RpcInterceptor


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """One of Octavo's services: its full name, how its errors look, and the fields that say where it listens."""

    name: str
    domain: str
    mapping: ErrorMapping
    max_receive_bytes: int
    address_field: str
    metrics_field: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An open endpoint. It answers at once, and says NOT_SERVING until it is told otherwise."""

    address: str
    metrics_address: str
    server: grpc.aio.Server
    health: Health
    _metrics: MetricsServer

    async def stop(self, grace_seconds: float) -> None:
        """Says NOT_SERVING, lets calls end for `grace_seconds`, and frees the ports."""
        await stop_gracefully(self.server, self.health, grace_seconds)
        await asyncio.to_thread(self._metrics.close)


async def open_endpoint(
    kind: ServiceKind,
    settings: ProcessSettings,
    registry: CollectorRegistry,
    add_servicer: Callable[[grpc.aio.Server], None],
) -> Endpoint:
    """Binds and serves on the running event loop. Raises StartupError, and then leaves no port or socket behind."""
    server = create_server(kind.max_receive_bytes, [RpcInterceptor(registry, kind.mapping, kind.domain)])
    add_servicer(server)
    enable_reflection(server, [kind.name])
    health = Health(server, [kind.name])
    address = bind(server, getattr(settings, kind.address_field), settings.server_tls())
    await server.start()
    try:
        wanted, explicit = getattr(settings, kind.metrics_field), kind.metrics_field in settings.model_fields_set
        metrics = start_metrics_server(registry, wanted, explicit=explicit)
    except StartupError:
        await server.stop(None)
        raise
    return Endpoint(address, metrics.address, server, health, metrics)
