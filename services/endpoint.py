"""Where a process is reached: its gRPC servers, health, reflection and metrics, opened and closed as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import structlog
from prometheus_client import CollectorRegistry

from services.config import ProcessSettings
from services.errors import ErrorMapping, StartupError
from services.grpc_server import ServerLimits, bind, create_server, enable_reflection, stop_gracefully
from services.health import Health
from services.metrics import MetricsServer, start_metrics_server
from services.rpc_interceptor import RpcInterceptor

SMALL_BYTES = 1 << 16
"""What is enough for the requests of health and admin services."""

LAST_WORDS_SECONDS = 1.0
"""For answers on their way at the end."""

_NO_LIMITS = ServerLimits()

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """One of Octavo's services: its full name, how its errors look, and the fields that say where it listens."""

    name: str
    domain: str
    mapping: ErrorMapping
    max_receive_bytes: int
    address_field: str
    metrics_field: str
    health_field: str
    also: tuple[str, ...] = ()
    """Further services of the same server, by their full names."""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.name, *self.also)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An open endpoint. It answers at once, and says NOT_SERVING until it is told otherwise."""

    address: str
    metrics_address: str
    server: grpc.aio.Server
    health: Health
    calls: RpcInterceptor
    _metrics: MetricsServer
    _others: list[grpc.aio.Server] = field(default_factory=list)

    async def serve_also(
        self,
        address: str,
        add_servicer: Callable[[grpc.aio.Server], None],
        guards: Sequence[grpc.aio.ServerInterceptor] = (),
        max_receive_bytes: int = SMALL_BYTES,
        limits: ServerLimits = _NO_LIMITS,
    ) -> str:
        """Serves something at a further address, without TLS, until the endpoint stops; returns the address it got.

        Raises StartupError.
        """
        server = create_server(max_receive_bytes, (self.calls, *guards), limits)
        add_servicer(server)
        bound = bind(server, address)
        await server.start()
        self._others.append(server)
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Says NOT_SERVING, lets calls end for `grace_seconds`, and frees the ports."""
        await stop_gracefully(self.server, self.health, grace_seconds)
        # Probes are answered to the end.
        await asyncio.gather(*(each.stop(LAST_WORDS_SECONDS) for each in self._others))
        await asyncio.to_thread(self._metrics.close)


async def open_endpoint(
    kind: ServiceKind,
    settings: ProcessSettings,
    registry: CollectorRegistry,
    add_servicer: Callable[[grpc.aio.Server], None],
    guards: Sequence[grpc.aio.ServerInterceptor] = (),
) -> Endpoint:
    """Binds and serves on the running event loop. Raises StartupError, and then leaves no port or socket behind.

    guards: interceptors of the service's own address, which may raise what the kind's mapping knows.
    """
    calls = RpcInterceptor(registry, kind.mapping, kind.domain)
    server = create_server(kind.max_receive_bytes, (calls, *guards), settings.limits())
    add_servicer(server)
    if settings.reflection:
        enable_reflection(server, kind.names)
    health = Health(server, kind.names)
    address = bind(server, getattr(settings, kind.address_field), settings.server_tls())
    await server.start()
    try:
        wanted, explicit = getattr(settings, kind.metrics_field), kind.metrics_field in settings.model_fields_set
        metrics = start_metrics_server(registry, wanted, explicit=explicit)
    except StartupError:
        await server.stop(None)
        raise
    endpoint = Endpoint(address, metrics.address, server, health, calls, metrics)
    try:
        await _open_probes(endpoint, getattr(settings, kind.health_field))
    except StartupError:
        await endpoint.stop(0)
        raise
    return endpoint


async def _open_probes(endpoint: Endpoint, address: str | None) -> None:
    """A server for probes, which neither speak TLS nor have a token."""
    if address is None:
        return
    bound = await endpoint.serve_also(address, endpoint.health.add_to)
    log.debug("health is served", address=bound)
