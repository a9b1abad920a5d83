"""A KV manager that is told to stop while a runner still has sequences: in a pod both are told at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channels import open_channel
from services.kv_process import start_kv_manager
from tests.services.kv_support import WAIT_SECONDS, LoopThread, kv_settings
from tests.services.runner_streams import WAYS, dial_by
from tests.services.session_script import opening, orders_of, progress, step
from tests.services.test_session_stream import begin, eventually, pb

GRACE_SECONDS = 60.0


@contextmanager
def stopping_kv_manager(directory: Path, grace_seconds: float):
    """Its address, a channel to it, and what stops the KV manager in the background."""
    thread = LoopThread()
    try:
        running = thread.run(start_kv_manager(kv_settings(directory)))

        def stop() -> Future:
            return asyncio.run_coroutine_threadsafe(running.stop(grace_seconds), thread.loop)

        with open_channel(running.address) as channel:
            yield running.address, channel, stop
    finally:
        thread.close()


def health(channel: grpc.Channel) -> int:
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS).status


@pytest.mark.parametrize("way", WAYS)
def test_a_runner_ends_what_it_has_and_begins_nothing_anew(tmp_path: Path, way: str) -> None:
    with stopping_kv_manager(tmp_path, GRACE_SECONDS) as (address, channel, stop):
        dial = dial_by(way, address)
        stream, epoch = begin(dial, "default")
        stopped = stop()
        assert eventually(lambda: health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING)
        # The sequence goes on, and others of the same session may still begin.
        answer = stream.say(step(epoch, 3, orders_of(handles=[1], computed_tokens=[6], asks=[4]))).answer
        assert (answer.number, len(answer.refusals)) == (3, 0)
        refused = dial()
        refused.tell(opening("two", "other"))
        assert refused.failure().reason == "STOPPING"
        assert not stopped.done()
        end = pb.SessionOrder(end=pb.EndOrder(progress=progress(handles=[1])))
        assert stream.say(step(epoch, 4, end)).answer.number == 4
        assert not stopped.done()
        assert stream.finish() == []
        stopped.result(WAIT_SECONDS)


@pytest.mark.parametrize("way", WAYS)
def test_a_runner_that_goes_on_is_ended_after_the_grace_time(tmp_path: Path, way: str) -> None:
    with stopping_kv_manager(tmp_path, 0.2) as (address, _, stop):
        stream, _ = begin(dial_by(way, address), "default")
        stopped = stop()
        assert stream.failure().reason == "STOPPING"
        stopped.result(WAIT_SECONDS)
