"""The drain of a runner: what it says, what it takes until when, what it counts, and that there is one of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.runner.v1 import runner_admin_pb2 as pb
from octavo.runner.v1 import runner_admin_pb2_grpc

from services.channels import open_channel
from services.client import OctavoError, generate_request
from services.client_retry import NO_RETRIES
from services.draining import Drainer
from services.errors import describe_rpc_error
from services.health import Health
from services.runner_wire import read_chunk
from services.traffic import Traffic
from tests.e2e.stack import NOT_SERVING, SERVING, health_of, run_octavo
from tests.model_runner.toy_model import answer
from tests.services.kv_support import WAIT_SECONDS
from tests.services.silent_client import Silent
from tests.services.toy_server import ToyServer, tokens_of, wait_until

PROMPT = [1, 2, 3, 4, 5]
TOKENS = 400


@contextmanager
def drained_server(directory: Path) -> Iterator[tuple[ToyServer, runner_admin_pb2_grpc.RunnerAdminServiceStub, str]]:
    """A server with an admin service, and that one's address."""
    address = f"unix:{directory}/admin.sock"
    with (
        ToyServer(directory, runner_admin_address=address, max_unread_tokens=200) as server,
        open_channel(address) as channel,
    ):
        server.run(server.endpoint.health.set_ready(True))
        yield server, runner_admin_pb2_grpc.RunnerAdminServiceStub(channel), address


def drain(lame_duck: float, seconds: float) -> pb.DrainRequest:
    return pb.DrainRequest(lame_duck_seconds=lame_duck, drain_seconds=seconds)


def readiness(server: ToyServer) -> tuple[int | None, ...]:
    return tuple(health_of(server.address, name) for name in ("readiness", "", "liveness"))


def refusal(client: Any) -> OctavoError:
    with pytest.raises(OctavoError) as caught:
        list(client.generate(PROMPT, max_tokens=1))
    return caught.value


def held(server: ToyServer, name: str) -> Silent:
    """A stream that lives as long as a test wants: its client does not read."""
    return Silent(server.address, generate_request(PROMPT, request_id=name, max_tokens=TOKENS, logprobs=20))


def is_paused(server: ToyServer, name: str) -> bool:
    return any(view.request_id == name and view.paused for view in server.engine.requests())


def read(stream: Silent) -> list[int]:
    return tokens_of([read_chunk(message) for message in stream.call])


def test_a_drain_with_a_live_stream(tmp_path: Path) -> None:
    with drained_server(tmp_path) as (server, admin, _), server.client(retry=NO_RETRIES) as client:
        assert readiness(server) == (SERVING, SERVING, SERVING)
        with held(server, "live") as stream:
            wait_until(lambda: is_paused(server, "live"))
            draining = admin.Drain.future(drain(5, 600), timeout=WAIT_SECONDS)
            wait_until(lambda: readiness(server) == (NOT_SERVING, NOT_SERVING, SERVING))
            assert tokens_of(list(client.generate(PROMPT, max_tokens=3))) == answer(PROMPT, 3)
            wait_until(lambda: server.answering.traffic.stopping)
            refused = refusal(client)
            assert (refused.code, refused.reason) == ("UNAVAILABLE", "STOPPING")
            assert readiness(server) == (NOT_SERVING, NOT_SERVING, SERVING)
            assert not draining.done()
            # The stream goes on to its end, and then there is nothing to wait for.
            assert read(stream) == answer(PROMPT, TOKENS)
            result = draining.result(WAIT_SECONDS)
        assert (result.finished_requests, result.remaining_requests) == (2, 0)
        assert result.elapsed.seconds >= 5


def test_a_drain_whose_time_is_over_says_what_is_left(tmp_path: Path) -> None:
    with drained_server(tmp_path) as (server, admin, address), server.client() as client:
        with held(server, "a") as first, held(server, "b") as second:
            wait_until(lambda: is_paused(server, "a") and is_paused(server, "b"))
            result = admin.Drain(drain(0, 0), timeout=WAIT_SECONDS)
            assert (result.finished_requests, result.remaining_requests) == (0, 2)
            # Another drain joins, without a lame-duck time of its own.
            late = ("--lame-duck-seconds", "3000", "--drain-seconds", "0.1")
            done = run_octavo("drain", "--admin-address", address, *late)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.startswith("Not drained: 0 requests finished in ")
            assert done.stdout.endswith(", and 2 requests are left; the time is over.\n")
            # Who is left goes on.
            assert read(first) == answer(PROMPT, TOKENS)
            client.abort("b")
            read(second)
        wait_until(lambda: not server.answering.traffic.in_progress)
        done = run_octavo("drain", "--admin-address", address)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Drained: 0 requests finished in ")
        assert done.stdout.endswith(" s, none are left.\n")
        assert done.stdout.count("\n") == 1


def test_a_drain_goes_on_when_its_caller_leaves(tmp_path: Path) -> None:
    with drained_server(tmp_path) as (server, admin, _):
        with pytest.raises(grpc.RpcError) as caught:
            admin.Drain(drain(2, 60), timeout=0.5)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: server.answering.traffic.stopping)
        assert health_of(server.address) == NOT_SERVING


def test_two_drains_are_one(tmp_path: Path) -> None:
    with drained_server(tmp_path) as (server, admin, _):
        first = admin.Drain.future(drain(1, 60), timeout=WAIT_SECONDS)
        wait_until(lambda: health_of(server.address) == NOT_SERVING)
        second = admin.Drain.future(drain(3000, 60), timeout=WAIT_SECONDS)
        assert first.result().remaining_requests == second.result().remaining_requests == 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (drain(-1, 0), "lame_duck_seconds"),
        (drain(3601, 0), "lame_duck_seconds"),
        (drain(0, 86_401), "drain_seconds"),
        (drain(float("nan"), 0), "lame_duck_seconds"),
    ],
)
def test_times_that_cannot_be_change_nothing(tmp_path: Path, request_: pb.DrainRequest, field: str) -> None:
    with drained_server(tmp_path) as (server, admin, _):
        with pytest.raises(grpc.RpcError) as caught:
            admin.Drain(request_, timeout=WAIT_SECONDS)
        view = describe_rpc_error(caught.value)
        assert (view.code, view.reason) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert view.sentence.startswith(f"{field} is ")
        assert health_of(server.address) == SERVING


def test_a_stop_ends_the_lame_duck_time() -> None:
    """SIGTERM in the middle of a drain: nothing is taken from then on, and the caller is told."""

    async def work() -> None:
        traffic, health = Traffic(), Health(grpc.aio.server(), ["a.B"])
        await health.set_ready(True)
        drainer = Drainer(traffic, health)
        draining = asyncio.create_task(drainer.Drain(drain(3000, 60), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not traffic.stopping
        await drainer.stop()
        assert traffic.stopping
        result = await asyncio.wait_for(draining, WAIT_SECONDS)
        assert (result.finished_requests, result.remaining_requests) == (0, 0)
        # A model that is loaded only now changes nothing.
        await health.set_ready(True)
        assert not health.ready

    asyncio.run(work())


def test_the_admin_service_is_nowhere_else(tmp_path: Path) -> None:
    with drained_server(tmp_path) as (server, _, _), open_channel(server.address) as channel:
        stub = runner_admin_pb2_grpc.RunnerAdminServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Drain(drain(0, 0), timeout=WAIT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_drain_of_nobody_is_one_line(tmp_path: Path) -> None:
    done = run_octavo("drain", "--admin-address", f"unix:{tmp_path}/no.sock")
    assert done.returncode == 2
    assert done.stderr == (
        f"octavo: No model runner answers at unix:{tmp_path}/no.sock (No such file or directory); is it running?\n"
    )
    done = run_octavo("drain")
    assert done.returncode == 2
    assert done.stderr.startswith("octavo: Where is the runner? Give its --admin-address")


def test_a_watch_learns_of_the_drain_and_goes_on(tmp_path: Path) -> None:
    with drained_server(tmp_path) as (server, admin, _), open_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="readiness"), timeout=WAIT_SECONDS
        )
        assert next(watch).status == SERVING
        admin.Drain(drain(0, 0), timeout=WAIT_SECONDS)
        assert next(watch).status == NOT_SERVING
        assert watch.is_active()
        watch.cancel()
