"""Client channels to an Octavo server: message sizes, quick reconnection, TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from services.errors import StartupError
from services.tls_files import read_ca, read_pair

# A server that comes back is found within a second; without this, gRPC waits up to two minutes. One that is too busy to
# greet is waited for like one that does not answer a ping: min_reconnect_backoff is how long an attempt to connect may
# take, and calls fail with it.
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 10_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Channels with equal options share a connection within a process; ours must end on its own.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a TLS client: the CA of the server's certificate, and its own certificate and key for mTLS."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None


def open_channel(address: str, tls: ClientTls | None = None) -> grpc.Channel:
    """A blocking channel to 'host:port' or 'unix:/path'; it connects at the first call. StartupError: bad TLS files."""
    if tls is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, _credentials(tls), options=_tls_options(address))


def open_aio_channel(address: str, tls: ClientTls | None = None) -> grpc.aio.Channel:
    """The same for asyncio."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, _credentials(tls), options=_tls_options(address))


def _tls_options(address: str) -> tuple[tuple[str, int | str], ...]:
    """A Unix socket has no host name for the certificate to bear: `localhost` stands in."""
    if not address.startswith("unix:"):
        return CHANNEL_OPTIONS
    return (*CHANNEL_OPTIONS, ("grpc.default_authority", "localhost"))


def check_tls(tls: ClientTls | None) -> None:
    """Raises StartupError for bad TLS files."""
    if tls is not None:
        _credentials(tls)


def _credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    ca = read_ca(tls.ca)
    if tls.cert is None and tls.key is None:
        return grpc.ssl_channel_credentials(ca)
    if tls.cert is None or tls.key is None:
        raise StartupError("A TLS client's certificate and key go together: give both or none.")
    cert, key = read_pair(tls.cert, tls.key)
    return grpc.ssl_channel_credentials(ca, key, cert)
