"""What both gRPC servers share: limits, keepalive, TLS, binding, reflection and a graceful stop."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from services.addresses import Address, TcpAddress, UnixAddress, parse_address
from services.errors import StartupError
from services.health import Health
from services.server_tls import ServerTls, server_credentials

MIB = 1 << 20
KV_MAX_RECEIVE_BYTES = 64 * MIB
RUNNER_MAX_RECEIVE_BYTES = 16 * MIB

# A client that answers no ping for 10 s is gone: its streams end, and what they hold comes back.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes from its clients.

    max_request_bytes: of one message; None: the service's own limit. max_concurrent_streams: calls at a time on one
    connection. max_metadata_bytes: of one call. max_connection_age_seconds: then a connection takes no new calls and
    ends with its last one; 0: never.
    """

    max_request_bytes: int | None = None
    max_concurrent_streams: int = 1024
    max_metadata_bytes: int = 16 << 10
    max_connection_age_seconds: float = 0


def create_server(
    max_receive_bytes: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    limits: ServerLimits = ServerLimits(),
) -> grpc.aio.Server:
    """A grpc.aio server that refuses requests above `max_receive_bytes`, or the limit given, by RESOURCE_EXHAUSTED."""
    options = [
        ("grpc.max_receive_message_length", limits.max_request_bytes or max_receive_bytes),
        ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
        # The first refuses some calls above it and the second all: as one number, it is a limit.
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        *_connection_age(limits.max_connection_age_seconds),
        ("grpc.max_send_message_length", -1),
        # With SO_REUSEPORT two servers on one port would share its calls; we want an error.
        ("grpc.so_reuseport", 0),
        *_KEEPALIVE,
    ]
    return grpc.aio.server(interceptors=list(interceptors), options=options)


def _connection_age(seconds: float) -> list[tuple[str, int]]:
    """Without a grace time, what is in progress on a connection that is too old ends by itself."""
    return [("grpc.max_connection_age_ms", max(1, round(seconds * 1000)))] if seconds else []


def enable_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Lets tools list the services, health and reflection included, and read their descriptors."""
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


async def stop_gracefully(server: grpc.aio.Server, state: Health, grace_seconds: float) -> None:
    """Says NOT_SERVING, takes no new calls, and cancels those that go on after `grace_seconds`."""
    await state.stop()
    await server.stop(grace_seconds)


def bind(server: grpc.aio.Server, address: str, tls: ServerTls | None = None) -> str:
    """Makes the server listen on 'host:port' or 'unix:/path' and returns the address with the port it got.

    Raises StartupError: a bad address, a port in use, a socket that somebody serves, a path that cannot be used, bad
    TLS files. A stale socket file is removed; socket and missing directory are made for this user alone.
    """
    try:
        parsed = parse_address(address)
    except ValueError as error:
        raise StartupError(str(error)) from None
    prepare(parsed)
    try:
        with for_the_owner(parsed):
            port = _add_port(server, str(parsed), tls)
    except RuntimeError:
        raise StartupError(f"Cannot listen on {parsed}: the system refuses it.") from None
    return str(TcpAddress(parsed.host, port)) if isinstance(parsed, TcpAddress) else str(parsed)


def prepare(address: Address) -> None:
    """Makes sure that the address can be bound, so that grpc-core has nothing to complain of; StartupError if not."""
    if isinstance(address, TcpAddress):
        _probe_port(address)
        return
    _make_directory(Path(address.path).absolute().parent, address)
    _remove_stale_socket(address)


def _add_port(server: grpc.aio.Server, address: str, tls: ServerTls | None) -> int:
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, server_credentials(tls))


@contextmanager
def for_the_owner(address: Address) -> Iterator[None]:
    """A socket file is made for its owner alone: it is open from the moment on when it has a name."""
    if isinstance(address, TcpAddress):
        yield
        return
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _probe_port(address: TcpAddress) -> None:
    """Binds each address that the host stands for, as grpc-core would, which is content if only one of them works."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise StartupError(f"Cannot listen on {address}: the host {address.host!r} has no address.") from None
    for family, kind, protocol, _, endpoint in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _try_bind(probe, endpoint, address)


def _try_bind(probe: socket.socket, endpoint: tuple[object, ...], address: TcpAddress) -> None:
    try:
        probe.bind(endpoint)
    except OSError as error:
        # A name may stand for an IPv6 address on a machine without IPv6.
        if error.errno == errno.EADDRNOTAVAIL and address.host == "localhost":
            return
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
        raise StartupError(f"Cannot listen on {address}: {reason}.") from None


def _make_directory(directory: Path, address: UnixAddress) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"Cannot make the directory of {address}: {error.strerror}.") from None


def _remove_stale_socket(address: UnixAddress) -> None:
    """Removes a socket file that nobody serves: grpc-core would take over a live one without a word."""
    try:
        mode = os.lstat(address.path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError(f"Cannot listen on {address}: {error.strerror}.") from None
    if not stat.S_ISSOCK(mode):
        raise StartupError(f"Cannot listen on {address}: the file exists and is no socket.")
    if _is_served(address):
        raise StartupError(f"Cannot listen on {address}: another process serves this socket.")
    _unlink(address)


def _is_served(address: UnixAddress) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:
            # Its queue of connections is full: somebody is there.
            return True
        except OSError as error:
            raise StartupError(f"Cannot listen on {address}: {error.strerror}.") from None
    return True


def _unlink(address: UnixAddress) -> None:
    try:
        os.unlink(address.path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartupError(f"Cannot remove the stale socket {address}: {error.strerror}.") from None
