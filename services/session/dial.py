"""How a runner reaches its KV manager: by the socket for sessions where there is one, and else by gRPC."""

from __future__ import annotations

import socket

from services.addresses import Address, UnixAddress, parse_address, session_address
from services.channels import ClientTls
from services.session.link import GrpcLink, Link, LinkBroken
from services.session.socket_link import SocketLink, connect


class SessionDial:
    """A Dial: each call is one attempt.

    A KV manager binds the socket beside its address before the address itself. So where the address can be connected to
    and the socket can't, there will be none: it is an older KV manager, or one that was told to have none.
    """

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """address: host:port or unix:/path. With TLS it is gRPC alone."""
        self._address = address
        self._tls = tls
        self._parsed: Address = parse_address(address)
        self._beside = session_address(address) if tls is None else None
        self._last: SocketLink | None = None

    def __call__(self) -> Link:
        last, self._last = self._last, None
        if self._beside is None or (last is not None and last.is_foreign):
            return GrpcLink(self._address, self._tls)
        connection = connect(self._beside) or self._connect_late(self._beside)
        if connection is None:
            return GrpcLink(self._address)
        self._last = SocketLink(connection, self._address)
        return self._last

    def _connect_late(self, beside: UnixAddress) -> socket.socket | None:
        """Looks again, if somebody is at the address itself by now. Raises LinkBroken when nobody is."""
        assert isinstance(self._parsed, UnixAddress), "only beside a Unix socket is another one"
        probe = connect(self._parsed)
        if probe is None:
            raise LinkBroken(f"nobody listens at {self._address}")
        probe.close()
        return connect(beside)
