"""TLS and mTLS of both services, and what is said when they fail, with certificates made for the test."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from model_runner.books import BooksUnreachable, PoolFacts
from services.channels import ClientTls, open_channel
from services.client import Client, OctavoError
from services.connection_faults import tls_fault
from services.errors import StartupError
from services.kv_process import RunningKvManager
from services.session.dial import SessionDial
from services.session.limits import SessionLimits
from services.session_books import SessionBooks
from services.watched_files import CHECK_SECONDS
from tests.model_runner.toy_model import answer
from tests.services.certificates import Certificates
from tests.services.kv_support import WAIT_SECONDS, kv_settings, run_command, running_kv_manager
from tests.services.toy_server import ToyServer, tokens_of, wait_until

FACTS = PoolFacts(num_blocks=3, block_size=4, bytes_per_block=0, model_fingerprint="m")
ADDRESSES = ("127.0.0.1:0", "unix:{directory}/kv.sock")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("tls"))
    for name in ("expired", "expired-client"):
        made.issue(name, expired=True)
    made.issue("elsewhere", hosts=("elsewhere.example",))
    return made


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Those of another CA."""
    return Certificates(tmp_path_factory.mktemp("strangers"))


def served_with(made: Certificates, name: str = "server", *, mtls: bool = False) -> dict[str, Any]:
    """A server's settings."""
    files = {"tls_cert": made.path(f"{name}.pem"), "tls_key": made.path(f"{name}.key")}
    return files | ({"tls_client_ca": made.path("ca.pem")} if mtls else {})


def client_tls(made: Certificates, name: str | None = None, ca: Certificates | None = None) -> ClientTls:
    """A client's files; without a name, no certificate of its own."""
    pair = (made.path(f"{name}.pem"), made.path(f"{name}.key")) if name else (None, None)
    return ClientTls((ca or made).path("ca.pem"), *pair)


@contextmanager
def manager(directory: Path, address: str, **given: Any) -> Iterator[RunningKvManager]:
    settings = kv_settings(directory, kv_address=address.format(directory=directory), **given)
    with running_kv_manager(settings) as running:
        yield running


def ask(address: str, tls: ClientTls | None) -> str:
    """What a call comes to: OK, or gRPC's sentence."""
    with open_channel(address, tls) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 - whatever TLS has against it
            return str(error.details())
    return "OK"


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("mtls", [False, True])
def test_a_session_over_tls_and_mtls(certificates: Certificates, tmp_path: Path, address: str, mtls: bool) -> None:
    with manager(tmp_path, address, **served_with(certificates, mtls=mtls)) as running:
        tls = client_tls(certificates, "client" if mtls else None)
        books = SessionBooks(SessionDial(running.address, tls), limits=SessionLimits(admit=30))
        books.open(FACTS)
        books.close()


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_tls_there_is_no_session(certificates: Certificates, tmp_path: Path, address: str) -> None:
    """No socket for sessions either, which would be a way around it, and none that an earlier process left is used."""
    (tmp_path / "kv.sock.session").touch()
    with manager(tmp_path, address, **served_with(certificates)) as running:
        assert running.session_socket is None
        plain = SessionBooks(SessionDial(running.address), limits=SessionLimits(admit=1))
        with pytest.raises(BooksUnreachable):
            plain.open(FACTS)
        plain.close()


def test_a_link_with_bad_files_is_a_failed_attempt_and_not_the_end(tmp_path: Path) -> None:
    """They may be in the middle of a change."""
    books = SessionBooks(SessionDial("127.0.0.1:1", ClientTls(tmp_path / "no.pem")), limits=SessionLimits(admit=1))
    with pytest.raises(BooksUnreachable, match=r"Cannot read .*no\.pem"):
        books.open(FACTS)
    books.close()


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_is_wrong_is_said(
    certificates: Certificates, strangers: Certificates, tmp_path: Path, address: str
) -> None:
    hangs_up = "it hangs up; it may want TLS (--tls-ca), or a certificate that it trusts (--tls-cert and --tls-key)"
    with manager(tmp_path, address, **served_with(certificates, mtls=True)) as running:
        cases = {
            "right": (client_tls(certificates, "client"), None),
            "no certificate": (client_tls(certificates), hangs_up),
            "of a stranger": (client_tls(strangers, "client", ca=certificates), hangs_up),
            "expired": (client_tls(certificates, "expired-client"), hangs_up),
            "no TLS": (None, hangs_up),
            "wrong CA": (
                client_tls(certificates, "client", ca=strangers),
                "its certificate is refused (unable to get local issuer certificate); --tls-ca must be the CA that "
                "signed it",
            ),
        }
        found = {name: tls_fault(ask(running.address, tls)) for name, (tls, _) in cases.items()}
    assert found == {name: fault for name, (_, fault) in cases.items()}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("expired", "its certificate is refused (certificate has expired)"),
        ("elsewhere", "its certificate is for another name than this address has"),
        (None, "it does not speak TLS; leave --tls-ca out"),
    ],
)
def test_what_is_wrong_with_a_server_is_said(
    certificates: Certificates, tmp_path: Path, name: str | None, fault: str
) -> None:
    given = served_with(certificates, name) if name else {}
    with manager(tmp_path, ADDRESSES[0], **given) as running:
        assert str(tls_fault(ask(running.address, client_tls(certificates)))).startswith(fault)
        flags = ("--kv-address", running.address, "--tls-ca", str(certificates.path("ca.pem")))
        done = run_command("check", *flags, GRPC_VERBOSITY="NONE")
    assert done.returncode == 2
    assert done.stderr.startswith(f"octavo: The KV manager at {running.address} cannot be reached: {fault}")
    assert done.stderr.count("\n") == 1


def test_nobody_there_is_no_fault_of_tls(certificates: Certificates) -> None:
    assert tls_fault(ask("127.0.0.1:1", client_tls(certificates))) is None


def test_the_tools_speak_mtls(certificates: Certificates, tmp_path: Path) -> None:
    with manager(tmp_path, ADDRESSES[0], **served_with(certificates, mtls=True)) as running:
        options = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
        flags = [part for name, file in options.items() for part in (f"--tls-{name}", str(certificates.path(file)))]
        done = run_command("check", "--kv-address", running.address, *flags)
    assert done.returncode == 2
    assert "no pool 'default' is open" in done.stderr


def test_a_runner_serves_mtls_and_tokens_and_probes_without(certificates: Certificates, tmp_path: Path) -> None:
    given = served_with(certificates, mtls=True)
    with ToyServer(tmp_path, runner_address="127.0.0.1:0", client_tls=client_tls(certificates, "client"), **given) as (
        server
    ):
        with server.client() as client:
            assert tokens_of(list(client.generate([1, 2, 3], max_tokens=3))) == answer([1, 2, 3], 3)
        with Client(server.address, tls=client_tls(certificates)) as nameless, pytest.raises(OctavoError) as caught:
            nameless.model()
    assert caught.value.sentence.startswith(f"The model runner at {server.address} cannot be reached: it hangs up")


def serial_of(address: str, made: Certificates) -> int:
    """The serial number of the certificate that a new connection gets, by Python's own TLS."""
    context = ssl.create_default_context(cafile=str(made.path("ca.pem")))
    context.check_hostname = False
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain) as secured:
        return x509.load_der_x509_certificate(secured.getpeercert(True) or b"").serial_number


def serial_in(path: Path) -> int:
    return x509.load_pem_x509_certificates(path.read_bytes())[0].serial_number


def test_new_certificates_are_taken_without_a_restart(tmp_path: Path) -> None:
    made = Certificates(tmp_path / "tls")
    first = serial_in(made.path("server.pem"))
    with manager(tmp_path, ADDRESSES[0], **served_with(made)) as running:
        with open_channel(running.address, client_tls(made)) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="liveness"), timeout=WAIT_SECONDS)
            next(watch)
            assert serial_of(running.address, made) == first
            made.issue("server")
            second = serial_in(made.path("server.pem"))
            assert first != second
            wait_until(lambda: serial_of(running.address, made) == second)
            # Who is connected stays so.
            stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            assert watch.is_active()
            watch.cancel()
        with capture_logs() as logs:
            made.path("server.key").write_bytes(made.path("client.key").read_bytes())
            wait_until(lambda: serial_of(running.address, made) == second and logs)
        warned = [each for each in logs if each["log_level"] == "warning"]
        assert [each["event"] for each in warned] == ["the certificates stay as they were"]
        assert "no matching certificate and key" in warned[0]["reason"]
        assert serial_of(running.address, made) == second


def test_a_new_ca_of_the_clients_is_taken_without_a_restart(strangers: Certificates, tmp_path: Path) -> None:
    made = Certificates(tmp_path / "tls")
    shutil.copy(made.path("ca.pem"), tmp_path / "clients.pem")
    given = served_with(made) | {"tls_client_ca": tmp_path / "clients.pem"}
    ours, theirs = client_tls(made, "client"), client_tls(strangers, "client", ca=made)
    with manager(tmp_path, ADDRESSES[0], **given) as running:
        assert ask(running.address, ours) == "OK"
        assert ask(running.address, theirs) != "OK"
        shutil.copy(strangers.path("ca.pem"), tmp_path / "clients.pem")
        wait_until(lambda: ask(running.address, theirs) == "OK")
        assert ask(running.address, ours) != "OK"


def test_files_are_looked_at_once_a_second() -> None:
    assert CHECK_SECONDS == 1.0


def test_a_key_of_another_certificate_is_refused(certificates: Certificates, tmp_path: Path) -> None:
    given = served_with(certificates) | {"tls_key": certificates.path("client.key")}
    with (
        pytest.raises(StartupError, match="no matching certificate and key"),
        manager(tmp_path, ADDRESSES[0], **given),
    ):
        pass


def test_bad_files_of_a_client_are_one_sentence(certificates: Certificates, tmp_path: Path) -> None:
    ca, pem = certificates.path("ca.pem"), certificates.path("client.pem")
    (tmp_path / "text.pem").write_text("no certificate")
    for tls, sentence in (
        (ClientTls(tmp_path / "no.pem"), f"Cannot read {tmp_path}/no.pem: No such file or directory."),
        (ClientTls(tmp_path / "text.pem"), f"{tmp_path}/text.pem is no PEM file."),
        (ClientTls(certificates.path("client.key")), f"{certificates.path('client.key')} holds no certificate in PEM."),
        (ClientTls(ca, pem), "A TLS client's certificate and key go together: give both or none."),
        (ClientTls(ca, pem, certificates.path("server.key")), "no matching certificate and key"),
    ):
        with pytest.raises(StartupError, match=re.escape(sentence)):
            open_channel("127.0.0.1:1", tls)
