"""Prometheus plumbing of a process: its own registry, the HTTP endpoint, and what the process says of itself."""

from __future__ import annotations

import asyncio
import platform
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import structlog
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)

from services.addresses import TcpAddress, parse_tcp_address
from services.errors import StartupError

T = TypeVar("T")

SCRAPE_SECONDS = 5.0
"""How long a scrape waits for the event loop to say what it has."""

_POLL_SECONDS = 0.05
"""How soon the HTTP server sees that it is to stop."""


def octavo_version() -> str:
    """The installed version, or 0 in a tree that was never installed."""
    try:
        return version("octavo")
    except PackageNotFoundError:
        return "0"


def new_registry(component: str) -> CollectorRegistry:
    """A registry of one process ('kv-manager', 'model-runner') with process, platform, GC and build facts."""
    # The _created series double the text and no dashboard reads them.
    disable_created_metrics()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("octavo_build", "Which Octavo this is.", registry=registry)
    build.info({"version": octavo_version(), "component": component, "python": platform.python_version()})
    return registry


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running HTTP endpoint; `address` has the port it got."""

    address: str
    _server: BaseServer
    _thread: threading.Thread

    def close(self) -> None:
        """Stops serving and frees the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def start_metrics_server(registry: CollectorRegistry, address: str, *, explicit: bool) -> MetricsServer:
    """Serves the registry at http://host:port/metrics from a thread.

    A busy port: StartupError when the operator asked for it (`explicit`); else a free one, which is logged.
    """
    try:
        wanted = parse_tcp_address(address)
    except ValueError as error:
        raise StartupError(str(error)) from None
    try:
        return _serve(registry, wanted)
    except OSError as error:
        if explicit:
            raise StartupError(f"Cannot serve metrics on {wanted}: {_reason(error)}.") from None
    found = _serve_anywhere(registry, wanted.host)
    structlog.get_logger().warning("default metrics port is busy, took another", wanted=address, took=found.address)
    return found


def _serve_anywhere(registry: CollectorRegistry, host: str) -> MetricsServer:
    try:
        return _serve(registry, TcpAddress(host, 0))
    except OSError as error:
        raise StartupError(f"Cannot serve metrics on {host}: {_reason(error)}.") from None


def _serve(registry: CollectorRegistry, address: TcpAddress) -> MetricsServer:
    kind = _Ipv6Server if ":" in address.host else _Server
    server = make_server(address.host, address.port, make_wsgi_app(registry), kind, _SilentHandler)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
    thread.start()
    return MetricsServer(str(TcpAddress(address.host, server.server_port)), server, thread)


class _Server(ThreadingMixIn, WSGIServer):
    """One thread for each scrape, so that a slow reader holds nobody up."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Binds without looking the host's name up, which may take seconds where no name server answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]
        self.setup_environ()


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not worth a line each."""


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def on_loop(loop: asyncio.AbstractEventLoop, read: Callable[[], T]) -> Callable[[], T]:
    """Makes `read` run on the event loop when another thread calls it, between two verbs and never within one.

    The call raises TimeoutError when the loop doesn't come to it within SCRAPE_SECONDS.
    """

    async def on_its_turn() -> T:
        return read()

    def call() -> T:
        return asyncio.run_coroutine_threadsafe(on_its_turn(), loop).result(SCRAPE_SECONDS)

    return call
