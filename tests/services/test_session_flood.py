"""A runner that says more than it reads: it slows itself alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from tests.services.kv_support import WAIT_SECONDS, kv_settings, kv_stub, running_kv_manager, scrape
from tests.services.runner_streams import WAYS, Dial, SocketStream, Stub, dial_by
from tests.services.session_script import opening, step
from tests.services.test_session_stream import begin, sound


@contextmanager
def flood(way: str, address: str) -> Iterator[Callable[[], bool]]:
    """A runner that says steps too far ahead, each of which is answered with the gap, and reads nothing; yields
    whether its stream is open."""
    going = threading.Event()
    going.set()
    far = step(epoch_of_flood(dial_by(way, address)) + 1, 1 << 40)
    if way == "grpc":

        def messages() -> Iterator[pb.SessionRequest]:
            yield opening("flood", "flood")
            while going.is_set():
                yield far

        # Without the probe, gRPC takes 64 KiB from a stream that nobody reads, and not megabytes.
        with grpc.insecure_channel(address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
            call = Stub(channel).Session(messages())
            yield call.is_active
            going.clear()
            call.cancel()
        return
    stream = SocketStream(address)
    stream.tell(opening("flood", "flood"))

    def speak() -> None:
        with suppress(OSError):
            while going.is_set():
                stream.tell(far)

    thread = threading.Thread(target=speak)
    thread.start()
    yield thread.is_alive
    going.clear()
    stream.lose()
    thread.join(WAIT_SECONDS)


def epoch_of_flood(dial: Dial) -> int:
    """The one before the flood's own."""
    stream = dial()
    epoch = stream.say(opening("probe", "flood")).opened.epoch
    stream.finish()
    return epoch


@pytest.mark.parametrize("way", WAYS)
def test_a_runner_that_reads_no_answers_is_not_read_either_and_holds_up_nobody_else(tmp_path, way):
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:

        def answered() -> float:
            return scrape(running.metrics_address)["octavo_kv_session_gaps_total", ()]

        with flood(way, running.address) as is_open:
            steady, epoch = begin(dial_by(way, running.address), "steady", "two")
            last, before = 2, -1.0
            # Until one is answered nothing while the other is answered 200 times.
            while not before or before != answered():
                before = answered()
                for number in range(last + 1, last + 201):
                    assert steady.say(step(epoch, number)).answer.number == number
                last += 200
            assert is_open()
            steady.finish()
        assert sound(stub, "steady")
