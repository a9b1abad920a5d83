"""TLS of a server: certificates from files, which new connections get as they are then."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from services.errors import StartupError
from services.tls_files import read_ca, read_pair
from services.watched_files import FileWatch

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files of a TLS server; with `client_ca`, clients must show a certificate that it signed (mTLS)."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def files(self) -> tuple[Path, ...]:
        """All of them."""
        return (self.cert, self.key) if self.client_ca is None else (self.cert, self.key, self.client_ca)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow the files: a new connection gets what they hold by then. StartupError: bad files."""
    certificates = _Certificates(tls)
    return grpc.dynamic_ssl_server_credentials(
        certificates.first, certificates.newer, require_client_authentication=tls.client_ca is not None
    )


class _Certificates:
    """What the files hold. gRPC's own threads ask for it, at each handshake."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._watch = FileWatch(tls.files())
        self.first = _configuration(tls)

    def newer(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration when the files have changed; None to go on with the old one."""
        with self._lock:
            if not self._watch.changed():
                return None
            try:
                configuration = _configuration(self._tls)
            except StartupError as error:
                log.warning("the certificates stay as they were", reason=str(error))
                return None
        log.info("certificates read again", cert=str(self._tls.cert))
        return configuration


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    cert, key = read_pair(tls.cert, tls.key)
    client_ca = read_ca(tls.client_ca) if tls.client_ca else None
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)
