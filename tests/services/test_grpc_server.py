"""Binding, health, reflection and the graceful stop of a server."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.addresses import TcpAddress, UnixAddress, parse_address
from services.channels import open_aio_channel, open_channel
from services.errors import StartupError
from services.grpc_server import MIB, bind, create_server, stop_gracefully
from services.health import Health
from services.kv_service import KV_SERVICE_NAME
from services.server_tls import ServerTls
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def bound(address: str, tls: ServerTls | None = None) -> str:
    """Binds a server to the address, lets it go again, and returns what it was bound to."""

    async def work() -> str:
        server = create_server(MIB)
        try:
            return bind(server, address, tls)
        finally:
            await server.stop(None)

    return asyncio.run(work())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A TCP socket that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_addresses_are_read() -> None:
    assert parse_address("127.0.0.1:80") == TcpAddress("127.0.0.1", 80)
    assert parse_address("[::1]:0") == TcpAddress("::1", 0)
    assert str(TcpAddress("::1", 5)) == "[::1]:5"
    assert parse_address("unix:/a/b") == parse_address("unix:///a/b") == UnixAddress("/a/b")


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "host:port", "1.2.3.4:65536", "a b:1", "unix:", "unix:/a/", "http://h:1"]
)
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(StartupError) as caught:
        bound(address)
    assert str(caught.value).count("\n") == 0


def test_port_0_gives_a_port() -> None:
    address = parse_address(bound("127.0.0.1:0"))
    assert isinstance(address, TcpAddress)
    assert address.port > 0


def test_a_port_in_use_is_refused(listener: socket.socket) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(StartupError, match=f"^Cannot listen on {address}: the port is in use.$"):
        bound(address)


def test_a_host_without_address_is_refused() -> None:
    with pytest.raises(StartupError, match="has no address"):
        bound("nowhere.invalid:1")


def test_the_directory_of_a_socket_is_made_for_the_user_alone(tmp_path: Path) -> None:
    bound(f"unix:{tmp_path}/a/b/kv.sock")
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="Cannot make the directory"):
        bound(f"unix:{tmp_path}/file/kv.sock")


def test_a_path_too_long_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="has 108 bytes, and a Unix socket takes 107"):
        bound("unix:/" + "x" * 107)


def test_a_stale_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    assert bound(f"unix:{path}") == f"unix:{path}"


def test_a_live_socket_is_left_alone(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running:
        with pytest.raises(StartupError, match="another process serves this socket"):
            bound(running.address)
        with kv_stub(running.address) as stub:
            opened = stub.OpenPool(
                pb.OpenPoolRequest(spec=pb.PoolSpec(num_blocks=2, block_size=1), runner_id="r"), timeout=30
            )
    assert opened.created
    assert not (tmp_path / "kv.sock").exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    path.write_text("mine")
    with pytest.raises(StartupError, match="is no socket"):
        bound(f"unix:{path}")
    assert path.read_text() == "mine"


def test_bad_tls_files_are_refused(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    tls = ServerTls(cert, key)
    with pytest.raises(StartupError, match=f"Cannot read {cert}: No such file"):
        bound("127.0.0.1:0", tls)
    cert.write_text("nothing")
    key.write_text("nothing")
    with pytest.raises(StartupError, match="is no PEM file"):
        bound("127.0.0.1:0", tls)
    for path in (cert, key):
        path.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(StartupError, match="no matching certificate and key"):
        bound("127.0.0.1:0", tls)


def test_reflection_lists_the_services(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, open_channel(running.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])))
        found = {each.name for each in answer.list_services_response.service}
    assert found == {KV_SERVICE_NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


def test_health_goes_from_starting_to_ready_to_stopping(tmp_path: Path) -> None:
    async def statuses(stub: health_pb2_grpc.HealthStub) -> list[int]:
        requests = [health_pb2.HealthCheckRequest(service=name) for name in ("", "a.B", "liveness")]
        return [(await stub.Check(each)).status for each in requests]

    async def work() -> None:
        server = create_server(MIB)
        health = Health(server, ["a.B"])
        address = bind(server, f"unix:{tmp_path}/h.sock")
        await server.start()
        async with open_aio_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert await statuses(stub) == [NOT_SERVING, NOT_SERVING, SERVING]
            await health.set_ready(True)
            assert await statuses(stub) == [SERVING, SERVING, SERVING]
            await health.set_ready(False)
            assert await statuses(stub) == [NOT_SERVING, NOT_SERVING, SERVING]
            await health.stop()
            await health.set_ready(True)
            assert await statuses(stub) == [NOT_SERVING, NOT_SERVING, SERVING]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Check(health_pb2.HealthCheckRequest(service="no.Such"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            await stop_gracefully(server, health, 1)
        assert not os.path.exists(f"{tmp_path}/h.sock")

    asyncio.run(work())


def test_a_watcher_sees_not_serving_before_the_server_goes(tmp_path: Path) -> None:
    seen: list[int] = []
    ended: list[grpc.StatusCode] = []
    first = threading.Event()

    def watch(address: str) -> None:
        with open_channel(address) as channel:
            try:
                for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                    seen.append(answer.status)
                    first.set()
            except grpc.RpcError as error:
                ended.append(error.code())

    with running_kv_manager(kv_settings(tmp_path)) as running:
        watcher = threading.Thread(target=watch, args=(running.address,))
        watcher.start()
        assert first.wait(30)
    watcher.join(30)
    assert seen == [SERVING, NOT_SERVING]
    assert ended == [grpc.StatusCode.UNAVAILABLE]
