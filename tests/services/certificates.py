"""Certificates made for a test: a CA with a server's and a client's pair, and what is wrong with others."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

HOSTS = ("localhost", "127.0.0.1")


class Certificates:
    """PEM files in a directory: ca.pem, and {server,client}.{pem,key} that it signed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.ca = trustme.CA()
        self.ca.cert_pem.write_to_path(str(self.path("ca.pem")))
        for name in ("server", "client"):
            self.issue(name)

    def issue(self, name: str, *, expired: bool = False, hosts: tuple[str, ...] = HOSTS) -> None:
        """Makes {name}.pem and {name}.key anew."""
        end = datetime.now(UTC) - timedelta(days=1) if expired else None
        begin = datetime(2020, 1, 1, tzinfo=UTC) if expired else None
        made = self.ca.issue_cert(*hosts, not_before=begin, not_after=end)
        self.path(f"{name}.pem").write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
        self.path(f"{name}.key").write_bytes(made.private_key_pem.bytes())

    def path(self, name: str) -> Path:
        return self._directory / name
