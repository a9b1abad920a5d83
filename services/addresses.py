"""Addresses that a server can listen on: 'host:port' and 'unix:/path'."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

MAX_UNIX_PATH_BYTES = 107
"""The longest path that the kernel takes for a Unix socket."""

SESSION_SUFFIX = ".session"
"""Behind the path of a KV manager's socket."""

MAX_SESSION_PATH_BYTES = 103
"""With it; what every system takes, macOS too."""

_TCP = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\s/\[\]]+):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP endpoint; port 0 asks for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A Unix socket in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Reads 'host:port', '[ipv6]:port', 'unix:/path' or 'unix:///path'; ValueError with a sentence otherwise."""
    if text.startswith("unix:"):
        return parse_unix_address(text)
    return parse_tcp_address(text)


def parse_tcp_address(text: str) -> TcpAddress:
    """Reads 'host:port' or '[ipv6]:port'; ValueError with a sentence otherwise."""
    match = _TCP.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no address: it must look like 127.0.0.1:50051, [::1]:50051 or unix:/path.")
    port = int(match["port"])
    if port > 65535:
        raise ValueError(f"Port {port} in {text!r} is too high: ports go from 0 to 65535.")
    return TcpAddress(match["host"].strip("[]"), port)


def parse_unix_address(text: str) -> UnixAddress:
    """Reads 'unix:/path' or 'unix:///path'; ValueError with a sentence otherwise."""
    if not text.startswith("unix:"):
        raise ValueError(f"{text!r} is no Unix socket: it must look like unix:/run/octavo/admin.sock.")
    return UnixAddress(_unix_path(text))


def session_address(text: str) -> UnixAddress | None:
    """The socket for sessions beside a KV manager's; None where that is no Unix socket, or its path is too long."""
    address = parse_address(text)
    if not isinstance(address, UnixAddress):
        return None
    path = f"{address.path}{SESSION_SUFFIX}"
    return UnixAddress(path) if len(path.encode()) <= MAX_SESSION_PATH_BYTES else None


def _unix_path(text: str) -> str:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not path or path.endswith("/") or "\0" in path:
        raise ValueError(f"{text!r} names no socket file: it must look like unix:/run/octavo/kv.sock.")
    size = len(path.encode())
    if size > MAX_UNIX_PATH_BYTES:
        raise ValueError(
            f"The socket path {path!r} has {size} bytes, and a Unix socket takes {MAX_UNIX_PATH_BYTES} at most."
        )
    return path


def free_port() -> int:
    """A TCP port of the loopback that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
