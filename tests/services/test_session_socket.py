"""The socket for sessions: where it is and where not, and what comes of bytes that are no session."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.manager import KvManager
from services.addresses import UnixAddress, session_address
from services.errors import StartupError
from services.session_frames import GREETING, MESSAGE, FrameReader, frame, message_frame
from services.session_socket import _Connection
from services.session_streams import SessionStreams
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager, scrape
from tests.services.runner_streams import SocketStream, dial_by
from tests.services.session_script import opening, step
from tests.services.test_session_stream import begin, eventually, occupancy

MALFORMED = "a message of the session is not well-formed"


@pytest.mark.parametrize(
    ("address", "beside"),
    [
        ("unix:/run/octavo/kv.sock", "/run/octavo/kv.sock.session"),
        ("unix:///run/kv", "/run/kv.session"),
        ("unix:kv", "kv.session"),
        ("unix:" + 95 * "x", 95 * "x" + ".session"),
        ("unix:" + 96 * "x", None),
        ("127.0.0.1:50052", None),
    ],
)
def test_its_path(address: str, beside: str | None) -> None:
    assert session_address(address) == (None if beside is None else UnixAddress(beside))


def test_it_is_its_owners_alone_and_gone_after_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "kv" / "kv.sock.session"
    with running_kv_manager(kv_settings(tmp_path, kv_address=f"unix:{tmp_path}/kv/kv.sock")) as running:
        assert running.session_socket is not None
        facts = path.stat()
        assert stat.S_ISSOCK(facts.st_mode)
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.exists()


def test_where_there_is_none(tmp_path: Path) -> None:
    longest = f"unix:{tmp_path}/{'x' * (107 - len(str(tmp_path)) - 1)}"
    for given in ({"session_socket": False}, {"kv_address": "127.0.0.1:0"}, {"kv_address": longest}):
        with running_kv_manager(kv_settings(tmp_path, **given)) as running:
            assert running.session_socket is None
            assert list(tmp_path.glob("*.session")) == []


def test_one_that_was_left_behind_is_replaced_and_one_that_is_served_is_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock.session"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with running_kv_manager(kv_settings(tmp_path)) as running:
        begin(dial_by("socket", running.address), "p")[0].finish()
        with (
            pytest.raises(StartupError, match=r"kv\.sock: another process serves this socket"),
            running_kv_manager(kv_settings(tmp_path)),
        ):
            pass
        # Nor is it taken from a KV manager whose other socket has lost its file.
        (tmp_path / "kv.sock").unlink()
        with (
            pytest.raises(StartupError, match=r"kv\.sock\.session: another process serves this socket"),
            running_kv_manager(kv_settings(tmp_path)),
        ):
            pass
        begin(dial_by("socket", running.address), "p")[0].finish()
    assert not path.exists()


def test_a_socket_that_another_has_made_in_its_place_stays(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock.session"
    with socket.socket(socket.AF_UNIX) as other, running_kv_manager(kv_settings(tmp_path)):
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_a_process_that_cannot_start_leaves_none_behind(tmp_path: Path) -> None:
    with (
        running_kv_manager(kv_settings(tmp_path, kv_address="127.0.0.1:0")) as first,
        pytest.raises(StartupError, match="Cannot serve metrics"),
        running_kv_manager(kv_settings(tmp_path, kv_metrics_address=first.metrics_address)),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "garbage",
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\xff" * 64, frame(GREETING, b""), frame(MESSAGE, b"\xff\xff")],
)
@pytest.mark.parametrize("opened", [False, True])
def test_bytes_that_are_no_session_end_the_stream(tmp_path: Path, garbage: bytes, opened: bool) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        stream = SocketStream(running.address)
        if opened:
            stream.say(opening("one", "p"))
        stream.tell_raw(garbage)
        view = stream.failure()
        assert (view.code, view.reason, view.sentence) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", MALFORMED)
        if opened:
            assert occupancy(stub, "p").held_blocks == 0
        assert running.sessions.counts.opened == opened


def test_a_message_that_is_cut_off_changes_nothing(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        stream, epoch = begin(dial_by("socket", running.address), "p")
        assert isinstance(stream, SocketStream)
        stream.tell_raw(message_frame(step(epoch, 3))[:-1])
        assert stream.finish() == []
        assert running.sessions.counts.steps == 2
        assert occupancy(stub, "p").held_blocks == 0


def test_a_part_of_a_message_is_no_sign_of_life(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path, session_silence_seconds=0.5)) as running:
        stream, epoch = begin(dial_by("socket", running.address), "p")
        assert isinstance(stream, SocketStream)
        message = message_frame(step(epoch, 3, *[pb.SessionOrder()] * 1000))
        for byte in message:
            if stream.has_ended():
                break
            stream.tell_raw(bytes([byte]))
            eventually(stream.has_ended, 0.01)
        assert stream.failure().reason == "SESSION_SILENT"


def test_who_says_nothing_at_all_is_ended_by_silence(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path, session_silence_seconds=0.2)) as running:
        assert SocketStream(running.address).failure().reason == "SESSION_SILENT"


def test_streams_are_counted_by_their_status_like_calls(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running:
        dial = dial_by("socket", running.address)
        begin(dial, "p")[0].finish()
        first, _ = begin(dial, "p")
        later, _ = begin(dial, "p", "two")
        first.failure()
        later.lose()

        def counted() -> dict[str, float]:
            name = "octavo_rpc_duration_seconds_count"
            found = {labels: value for (key, labels), value in scrape(running.metrics_address).items() if key == name}
            return {
                dict(labels)["code"]: value for labels, value in found.items() if dict(labels)["method"] == "Session"
            }

        assert eventually(lambda: counted() == {"OK": 1, "ABORTED": 1, "CANCELLED": 1})
        samples = scrape(running.metrics_address)
        assert samples["octavo_kv_sessions_opened_total", ()] == 3
        assert samples["octavo_kv_sessions_ended_total", (("cause", "stream"),)] == 2
        assert samples["octavo_kv_sessions_ended_total", (("cause", "taken"),)] == 1


def test_who_does_not_read_why_it_ends_is_let_go(tmp_path: Path) -> None:
    """It has said more than is answered, is not read any more, and so falls silent."""
    with running_kv_manager(kv_settings(tmp_path, session_silence_seconds=0.5)) as running:
        stream, epoch = begin(dial_by("socket", running.address), "p")
        assert isinstance(stream, SocketStream)
        stream.fill(message_frame(step(epoch, 1 << 40)))
        assert running.session_socket is not None
        assert eventually(lambda: not running.session_socket._connections)
        assert running.sessions.ended["silence"] == 1
        stream.lose()


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__()
        self._name = name
        self._log = log
        self._reader = FrameReader(1 << 20)

    def write(self, data: bytes) -> None:
        self._reader.feed(data)
        while (found := self._reader.next()) is not None:
            if found[0] == MESSAGE:
                response = pb.SessionResponse.FromString(found[1])
                self._log.append(f"{self._name}{response.answer.number or ''}")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        self._log.append(f"{self._name} pauses")

    def resume_reading(self) -> None:
        self._log.append(f"{self._name} reads")

    def close(self) -> None:
        pass


def connected(name: str, log: list[str], streams: SessionStreams) -> _Connection:
    """A connection whose pool is open."""
    connection = _Connection(set(), lambda: None, streams, 1 << 20, lambda code, seconds: None)
    connection.connection_made(Wire(name, log))
    connection.data_received(message_frame(opening(name, name)))
    return connection


def test_of_messages_that_come_at_once_one_is_handled_in_each_turn() -> None:
    log: list[str] = []

    async def work() -> None:
        manager = KvManager("boot")
        streams = SessionStreams(manager)
        for name in "ab":
            connection = connected(name, log, streams)
            steps = [step(manager.epoch(name), number) for number in (1, 2, 3)]
            connection.data_received(b"".join(map(message_frame, steps)))
        for _ in range(3):
            await asyncio.sleep(0)

    asyncio.run(work())
    assert log == [
        *("a", "a reads", "a1", "a pauses", "b", "b reads", "b1", "b pauses"),
        *("a2", "a pauses", "b2", "b pauses", "a3", "a reads", "b3", "b reads"),
    ]


def test_while_answers_are_not_read_nothing_is_read_and_nothing_answered() -> None:
    log: list[str] = []

    async def work() -> None:
        manager = KvManager("boot")
        connection = connected("a", log, SessionStreams(manager))
        connection.pause_writing()
        connection.data_received(message_frame(step(manager.epoch("a"), 1)))
        await asyncio.sleep(0)
        log.append("are read")
        connection.resume_writing()
        await asyncio.sleep(0)

    asyncio.run(work())
    assert log == ["a", "a reads", "a pauses", "are read", "a1", "a reads"]
