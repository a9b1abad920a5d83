"""Settings that both services share: where the KV manager is, TLS, limits of the server, logs."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from services.config_base import (
    AnyAddress,
    Bytes,
    OctavoSettings,
    OptionalBytes,
    TcpAddressText,
    UnixAddressText,
    WholeNumber,
    default_kv_address,
)
from services.errors import StartupError
from services.grpc_server import ServerLimits
from services.logging import LogFormat, LogLevel
from services.server_tls import ServerTls

KIB = 1 << 10


class ServerTlsFields(OctavoSettings):
    """TLS of a server."""

    tls_cert: Path | None = Field(None, description="PEM certificate to serve TLS with. Unset: no TLS.")
    tls_key: Path | None = Field(None, description="PEM private key of --tls-cert.")
    tls_client_ca: Path | None = Field(None, description="PEM CA that clients' certificates must be signed by (mTLS).")

    def server_tls(self) -> ServerTls | None:
        """The TLS files of the server; None without TLS. StartupError when one of a pair is missing."""
        if self.tls_cert is None and self.tls_key is None and self.tls_client_ca is None:
            return None
        if self.tls_cert is None or self.tls_key is None:
            raise StartupError("TLS needs both --tls-cert and --tls-key.")
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)


class ProcessSettings(ServerTlsFields):
    """What both services share."""

    kv_address: AnyAddress = Field(
        default_factory=default_kv_address,
        description="Where the KV manager listens: unix:/path or host:port.",
        json_schema_extra={"shown_default": "unix:$XDG_RUNTIME_DIR/octavo/kv.sock"},
    )
    reflection: bool = Field(True, description="Lets anybody who can connect list services and messages.")
    max_request_bytes: OptionalBytes = Field(
        None,
        ge=1,
        le=1 << 30,
        description="The largest message that is taken, in bytes or with a unit (KiB, MiB).",
        json_schema_extra={
            "shown_default": "64MiB at the KV manager, 16MiB at the model runner",
            "metavar": "BYTES",
        },
    )
    max_concurrent_streams: WholeNumber = Field(
        1024, ge=1, le=1 << 30, description="Calls at a time on one connection; further ones wait at the client."
    )
    max_metadata_bytes: Bytes = Field(
        16 * KIB,
        ge=KIB,
        le=1 << 20,
        description="Metadata of one call, at most, in bytes or with a unit.",
        json_schema_extra={"shown_default": "16KiB", "metavar": "BYTES"},
    )
    max_connection_age_seconds: float = Field(
        0,
        ge=0,
        le=1 << 20,
        description="Age at which a connection takes no new calls, so that clients connect anew; 0: never.",
    )
    log_level: LogLevel = Field("info", description="The least severe log line that is written.")
    log_format: LogFormat = Field("console", description="Log lines for people, or one JSON object each.")
    grace_seconds: float = Field(
        10, ge=0, le=3600, description="Seconds that calls may go on for after SIGTERM, before they are ended."
    )

    def limits(self) -> ServerLimits:
        """What the gRPC server takes from its clients."""
        return ServerLimits(
            self.max_request_bytes,
            self.max_concurrent_streams,
            self.max_metadata_bytes,
            self.max_connection_age_seconds,
        )


class RunnerServerSettings(ProcessSettings):
    """Where the model runner listens, and whom it serves."""

    runner_address: AnyAddress = Field(
        "127.0.0.1:50051", description="Where the model runner listens: host:port or unix:/path."
    )
    runner_metrics_address: TcpAddressText = Field(
        "127.0.0.1:9402", description="host:port of the model runner's Prometheus metrics; port 0 takes a free one."
    )
    runner_health_address: TcpAddressText | None = Field(
        None,
        description="host:port of a second server without TLS that has only grpc.health.v1, for the kubelet's probes.",
        json_schema_extra={"shown_default": "none"},
    )
    runner_admin_address: UnixAddressText | None = Field(
        None,
        description="Socket of the admin service, for its owner alone: unix:/path. `octavo drain` needs it.",
        json_schema_extra={"shown_default": "none"},
    )
    auth_tokens: Path | None = Field(
        None, description="YAML file of bearer tokens, each of a tenant. Unset: anybody who can connect is served."
    )
    allow_plaintext_tokens: bool = Field(
        False, description="Takes tokens without TLS on an address beyond this machine, behind a mesh that encrypts."
    )
