"""TLS and mTLS, with certificates that openssl makes for the test."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from model_runner.books import BooksUnreachable, PoolFacts
from services.channels import ClientTls, open_channel
from services.errors import StartupError
from services.session.limits import SessionLimits
from services.session.link import GrpcLink
from services.session_books import SessionBooks
from tests.services.kv_support import kv_settings, run_command, running_kv_manager

FACTS = PoolFacts(num_blocks=3, block_size=4, bytes_per_block=0, model_fingerprint="m")

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


class Certificates:
    """A CA, a server's pair and a client's pair in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._openssl("req", "-x509", "-nodes", *self._new("ca"), "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
        for name in ("server", "client"):
            self._openssl("req", "-nodes", *self._new(name), "-out", f"{name}.csr", "-subj", f"/CN={name}")
            (directory / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
            signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
            self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)

    def path(self, name: str) -> Path:
        return self._directory / name

    def _new(self, name: str) -> tuple[str, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-keyout", f"{name}.key")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


def test_tls_on_both_kinds_of_address(certificates: Certificates, tmp_path: Path) -> None:
    given = {"tls_cert": certificates.path("server.pem"), "tls_key": certificates.path("server.key")}
    tls = ClientTls(certificates.path("ca.pem"))
    for address in ("127.0.0.1:0", f"unix:{tmp_path}/kv.sock"):
        with running_kv_manager(kv_settings(tmp_path, kv_address=address, **given)) as running:
            books = SessionBooks(partial(GrpcLink, running.address, tls), limits=SessionLimits(admit=10))
            books.open(FACTS)
            books.close()
            plain = SessionBooks(partial(GrpcLink, running.address))
            with pytest.raises(BooksUnreachable):
                plain.open(FACTS)
            plain.close()


def test_mtls_asks_for_the_clients_certificate(certificates: Certificates, tmp_path: Path) -> None:
    given = {
        "tls_cert": certificates.path("server.pem"),
        "tls_key": certificates.path("server.key"),
        "tls_client_ca": certificates.path("ca.pem"),
    }
    with running_kv_manager(kv_settings(tmp_path, kv_address="127.0.0.1:0", **given)) as running:
        nameless = open_channel(running.address, ClientTls(certificates.path("ca.pem")))
        with nameless, pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(nameless).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        options = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
        flags = [part for name, file in options.items() for part in (f"--tls-{name}", str(certificates.path(file)))]
        done = run_command("check", "--kv-address", running.address, *flags)
        assert done.returncode == 2
        assert "no pool 'default' is open" in done.stderr


def test_a_key_of_another_certificate_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    given = {"tls_cert": certificates.path("server.pem"), "tls_key": certificates.path("client.key")}
    with (
        pytest.raises(StartupError, match="no matching certificate and key"),
        running_kv_manager(kv_settings(tmp_path, kv_address="127.0.0.1:0", **given)),
    ):
        pass


def test_a_missing_ca_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no\.pem: No such file"):
        open_channel("127.0.0.1:1", ClientTls(tmp_path / "no.pem"))
