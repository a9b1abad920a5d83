"""What a server takes from its clients: sizes, calls, metadata, the age of a connection; sockets; reflection off."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import open_channel
from services.client import OctavoError
from services.config import KvManagerSettings, ModelRunnerSettings, load_settings
from services.errors import StartupError
from services.grpc_server import (
    KV_MAX_RECEIVE_BYTES,
    MIB,
    RUNNER_MAX_RECEIVE_BYTES,
    ServerLimits,
    bind,
    create_server,
)
from tests.e2e.stack import free_port
from tests.model_runner.toy_model import answer
from tests.services.kv_support import WAIT_SECONDS, kv_settings, running_kv_manager
from tests.services.toy_server import ToyServer, tokens_of

Stub = kv_manager_pb2_grpc.KvManagerServiceStub
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def limited(directory: Path, **given: Any) -> Iterator[tuple[grpc.Channel, Stub]]:
    """A KV manager with limits and an open pool, and a channel to it."""
    with running_kv_manager(kv_settings(directory, **given)) as running, open_channel(running.address) as channel:
        stub = Stub(channel)
        spec = pb.PoolSpec(num_blocks=4, block_size=4)
        stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="r"), timeout=WAIT_SECONDS)
        yield channel, stub


def status_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code: grpc.StatusCode = caught.value.code()
    return code


def lookup(stub: Stub, size: int, **more: Any) -> None:
    stub.Lookup(pb.LookupRequest(token_ids=[1] * size), timeout=WAIT_SECONDS, **more)


def test_a_message_above_the_limit_is_refused(tmp_path: Path) -> None:
    """A token id below 128 is a byte: 1,000 of them and a few bytes around are below 1,100."""
    with limited(tmp_path, max_request_bytes="1100") as (_, stub):
        lookup(stub, 1000)
        assert status_of(lambda: lookup(stub, 1200)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        lookup(stub, 1000)


def test_a_runner_has_the_same_limits(tmp_path: Path) -> None:
    with ToyServer(tmp_path, max_request_bytes="1100", max_metadata_bytes="2KiB") as server:
        with server.client() as client:
            assert len(client.tokenize("a" * 1000)) == 1000
            with pytest.raises(OctavoError) as caught:
                client.tokenize("a" * 1200)
            assert caught.value.code == "RESOURCE_EXHAUSTED"
        with server.client(token="x" * 3000) as client, pytest.raises(OctavoError) as caught:
            client.model()
        assert caught.value.code == "RESOURCE_EXHAUSTED"


def test_the_limits_of_a_message_are_those_of_the_service_unless_given() -> None:
    assert (KV_MAX_RECEIVE_BYTES, RUNNER_MAX_RECEIVE_BYTES) == (64 << 20, 16 << 20)
    for kind in (KvManagerSettings, ModelRunnerSettings):
        assert load_settings(kind).limits() == ServerLimits(None, 1024, 16384, 0)
        given = load_settings(kind, {"max_request_bytes": "2MiB", "max_metadata_bytes": "32KiB"}).limits()
        assert (given.max_request_bytes, given.max_metadata_bytes) == (2 << 20, 32 << 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_request_bytes", "0"),
        ("max_concurrent_streams", "0"),
        ("max_metadata_bytes", "1023"),
        ("max_connection_age_seconds", "-1"),
        ("runner_admin_address", "127.0.0.1:5"),
        ("runner_health_address", "unix:/x"),
    ],
)
def test_limits_that_cannot_be(name: str, value: str) -> None:
    with pytest.raises(StartupError, match=f"--{name.replace('_', '-')} "):
        load_settings(ModelRunnerSettings, {name: value})


def test_metadata_above_the_limit_is_refused(tmp_path: Path) -> None:
    with limited(tmp_path, max_metadata_bytes="2KiB") as (_, stub):
        lookup(stub, 1, metadata=(("note", "x" * 1000),))
        for size in (2048, 4096, 100_000):
            code = status_of(lambda size=size: lookup(stub, 1, metadata=(("note", "x" * size),)))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        lookup(stub, 1, metadata=(("note", "x" * 1000),))


def test_calls_above_the_limit_wait_at_the_client(tmp_path: Path) -> None:
    with limited(tmp_path, max_concurrent_streams="2") as (_, stub):
        watches = [stub.WatchEvents(pb.WatchEventsRequest(), timeout=WAIT_SECONDS) for _ in range(2)]
        for watch in watches:
            next(watch)
        answered = threading.Event()
        waiting = stub.GetPool.future(pb.GetPoolRequest(), timeout=WAIT_SECONDS)
        waiting.add_done_callback(lambda _: answered.set())
        assert not answered.wait(0.5)
        # Other connections have a count of their own.
        with open_channel(f"unix:{tmp_path}/kv.sock") as other:
            Stub(other).GetPool(pb.GetPoolRequest(), timeout=WAIT_SECONDS)
        assert not answered.is_set()
        watches[0].cancel()
        assert waiting.result(WAIT_SECONDS).occupancy.usable_blocks == 3
        watches[1].cancel()


def test_an_old_connection_takes_no_new_calls_and_keeps_those_it_has(tmp_path: Path) -> None:
    """gRPC varies the age by a tenth, so that not all clients come at once."""
    with limited(tmp_path, max_connection_age_seconds="1") as (channel, stub):
        watch = stub.WatchEvents(pb.WatchEventsRequest(), timeout=WAIT_SECONDS)
        next(watch)
        states: list[grpc.ChannelConnectivity] = []
        left = threading.Event()

        def note(state: grpc.ChannelConnectivity) -> None:
            states.append(state)
            if grpc.ChannelConnectivity.READY in states and state is grpc.ChannelConnectivity.IDLE:
                left.set()

        channel.subscribe(note)
        assert left.wait(WAIT_SECONDS), states
        # On a new connection; the watch goes on with the old one.
        stub.Allocate(pb.AllocateRequest(sequence_id="s", token_ids=[1]), timeout=WAIT_SECONDS)
        freed = pb.SequenceAppend(sequence_id="s")
        stub.Free(pb.FreeRequest(sequences=[freed]), timeout=WAIT_SECONDS)
        stub.ResetCache(pb.ResetCacheRequest(), timeout=WAIT_SECONDS)
        assert next(watch).WhichOneof("event") is not None
        watch.cancel()


def test_without_reflection_all_else_works(tmp_path: Path) -> None:
    with limited(tmp_path, reflection=False) as (channel, stub):
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        code = status_of(lambda: next(reflection.ServerReflectionInfo(asked, timeout=WAIT_SECONDS)))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert stub.GetPool(pb.GetPoolRequest(), timeout=WAIT_SECONDS).occupancy.usable_blocks == 3
        request = health_pb2.HealthCheckRequest(service="readiness")
        assert health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status == SERVING


def test_a_runner_without_reflection_answers(tmp_path: Path) -> None:
    with ToyServer(tmp_path, reflection=False) as server, server.client() as client:
        assert tokens_of(list(client.generate([1, 2], max_tokens=3))) == answer([1, 2], 3)


def test_sockets_are_their_owners_alone(tmp_path: Path) -> None:
    given = {"runner_admin_address": f"unix:{tmp_path}/new/admin.sock"}
    with (
        running_kv_manager(kv_settings(tmp_path, kv_address=f"unix:{tmp_path}/kv/kv.sock")),
        ToyServer(tmp_path, runner_address=f"unix:{tmp_path}/new/runner.sock", **given),
    ):
        for name in ("kv/kv.sock", "new/admin.sock", "new/runner.sock"):
            facts = (tmp_path / name).stat()
            assert stat.S_ISSOCK(facts.st_mode)
            assert stat.S_IMODE(facts.st_mode) == 0o600
            assert stat.S_IMODE((tmp_path / name).parent.stat().st_mode) == 0o700


def test_a_socket_is_closed_to_others_from_the_first_moment_whatever_the_umask(tmp_path: Path) -> None:
    """bind() alone makes the file; nobody sets its mode afterwards, so that there is no moment to slip through."""

    async def work() -> tuple[int, int]:
        server = create_server(MIB)
        bind(server, f"unix:{tmp_path}/s.sock")
        mode = stat.S_IMODE((tmp_path / "s.sock").stat().st_mode)
        await server.stop(None)
        return mode, os.umask(0)

    before = os.umask(0)
    try:
        assert asyncio.run(work()) == (0o600, 0)
    finally:
        os.umask(before)


def test_probes_have_a_server_of_their_own(tmp_path: Path) -> None:
    port = free_port()
    with (
        running_kv_manager(kv_settings(tmp_path, kv_health_address=f"127.0.0.1:{port}")),
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "readiness", "octavo.kv.v1.KvManagerService"):
            request = health_pb2.HealthCheckRequest(service=name)
            assert stub.Check(request, timeout=WAIT_SECONDS).status == SERVING, name
        # Nothing else is served there.
        code = status_of(lambda: Stub(channel).GetPool(pb.GetPoolRequest(), timeout=WAIT_SECONDS))
        assert code is grpc.StatusCode.UNIMPLEMENTED


def test_a_port_for_probes_that_is_in_use_is_refused_and_nothing_stays_behind(tmp_path: Path) -> None:
    with (
        running_kv_manager(kv_settings(tmp_path, kv_address="127.0.0.1:0")) as first,
        pytest.raises(StartupError, match="the port is in use"),
        running_kv_manager(kv_settings(tmp_path, kv_health_address=first.address)),
    ):
        pass
    assert not (tmp_path / "kv.sock").exists()
