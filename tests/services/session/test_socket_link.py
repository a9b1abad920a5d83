"""The runner's end of the socket for sessions: which way it takes, and whom it meets there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.rpc import status_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.session.dial import SessionDial
from services.session.link import GrpcLink, Link, LinkBroken
from services.session.socket_link import SocketLink
from services.session_frames import CONTRACT, GREETING, MESSAGE, STATUS, FrameReader, frame, message_frame
from tests.services.kv_support import WAIT_SECONDS, kv_settings, running_kv_manager
from tests.services.session_script import opening
from tests.services.test_session_stream import eventually


def next_of(link: Link) -> pb.SessionResponse:
    response = link.receive(WAIT_SECONDS)
    assert response is not None
    return response


def end_of(link: Link) -> LinkBroken:
    """Why the link breaks; it says so whenever it is asked."""
    with pytest.raises(LinkBroken) as first:
        assert link.receive(WAIT_SECONDS) is None
    with pytest.raises(LinkBroken) as again:
        link.receive(0)
    assert again.value is first.value
    return first.value


def is_by_socket(dial: SessionDial) -> bool:
    link = dial()
    link.close()
    return isinstance(link, SocketLink)


class Peer:
    """Listens in the place of a KV manager, and does as the test says."""

    def __init__(self, directory: Path) -> None:
        self.address = f"unix:{directory}/kv.sock"
        self.listeners = []
        for name in ("kv.sock.session", "kv.sock"):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(directory / name))
            listener.listen(1)
            listener.settimeout(WAIT_SECONDS)
            self.listeners.append(listener)
        self.dial = SessionDial(self.address)

    def meet(self) -> tuple[SocketLink, socket.socket]:
        """A link and its other end."""
        link = self.dial()
        assert isinstance(link, SocketLink)
        other, _ = self.listeners[0].accept()
        other.settimeout(WAIT_SECONDS)
        return link, other

    def greet(self) -> tuple[SocketLink, socket.socket]:
        """The same, with a greeting that has come."""
        link, other = self.meet()
        other.sendall(frame(GREETING, CONTRACT))
        assert eventually(lambda: link.connected)
        return link, other


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    for listener in peer.listeners:
        listener.close()


@contextmanager
def no_thread_stays() -> Iterator[None]:
    """Whatever threads links have begun inside come to their ends."""
    before = set(threading.enumerate())
    yield
    assert eventually(lambda: set(threading.enumerate()) <= before)


def test_a_kv_manager_with_a_socket_is_spoken_to_over_it(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, no_thread_stays():
        link = SessionDial(running.address)()
        assert isinstance(link, SocketLink)
        assert eventually(lambda: link.connected)
        link.send(opening("one", "p"))
        epoch = next_of(link).opened.epoch
        link.close_pool(pb.ClosePoolRequest(pool_id="p", epoch=epoch), WAIT_SECONDS)
        broken = end_of(link)
        assert (broken.code, broken.reason) == ("NOT_FOUND", "UNKNOWN_POOL")
        assert "pool 'p'" in str(broken)


@pytest.mark.parametrize("given", [{"session_socket": False}, {"kv_address": "127.0.0.1:0"}])
def test_one_without_a_socket_is_spoken_to_by_grpc(tmp_path: Path, given: dict[str, object]) -> None:
    with running_kv_manager(kv_settings(tmp_path, **given)) as running:
        link = SessionDial(running.address)()
        assert isinstance(link, GrpcLink)
        assert eventually(lambda: link.connected)
        link.send(opening("one", "p"))
        assert next_of(link).opened.epoch
        link.close()


def test_a_socket_that_was_left_behind_is_not_taken_for_one(tmp_path: Path) -> None:
    """A KV manager was killed, and one that has none is in its place."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "kv.sock.session"))
    with running_kv_manager(kv_settings(tmp_path, session_socket=False)) as running:
        assert not is_by_socket(SessionDial(running.address))


def test_nobody_there_is_a_failed_attempt(tmp_path: Path) -> None:
    with pytest.raises(LinkBroken, match=r"nobody listens at unix:.*kv\.sock"):
        SessionDial(f"unix:{tmp_path}/kv.sock")()


def test_a_socket_whose_line_is_full_is_a_failed_attempt(peer: Peer) -> None:
    links = [peer.dial() for _ in range(2)]
    with pytest.raises(LinkBroken, match="takes no connections"):
        peer.dial()
    for link in links:
        link.close()


def test_another_protocol_at_the_socket_is_given_up_for_grpc_once(peer: Peer) -> None:
    with no_thread_stays():
        for words in (b"HTTP/1.1 400 Bad Request\r\n\r\n", frame(GREETING, b"octavo.kv.v2.KvManagerService/Session")):
            link, other = peer.meet()
            other.sendall(words)
            broken = end_of(link)
            assert (broken.code, broken.reason, link.connected) == ("INTERNAL", "", False)
            assert not is_by_socket(peer.dial)
            other.close()
        assert is_by_socket(peer.dial)


def test_a_socket_that_accepts_and_never_answers_is_never_connected(peer: Peer) -> None:
    with no_thread_stays():
        link, other = peer.meet()
        assert link.receive(0.1) is None
        assert not link.connected
        link.close()
        assert str(end_of(link)) == f"no answer from the KV manager at {peer.address}"
        # It may be stopped: what is behind the other socket would not answer either.
        assert is_by_socket(peer.dial)
        other.close()


@pytest.mark.parametrize("words", [b"", message_frame(pb.SessionResponse())[:3], b"\x00\x00\x00\x00\x09cut off"])
def test_a_peer_that_goes_without_a_status_is_unavailable(peer: Peer, words: bytes) -> None:
    with no_thread_stays():
        link, other = peer.greet()
        other.sendall(words)
        other.close()
        broken = end_of(link)
        assert (broken.code, broken.reason) == ("UNAVAILABLE", "")
        link.send(pb.SessionRequest())


@pytest.mark.parametrize("words", [b"\x99" * 9, frame(MESSAGE, b"\xff\xff")])
def test_garbage_from_a_peer_breaks_the_link(peer: Peer, words: bytes) -> None:
    with no_thread_stays():
        link, other = peer.greet()
        other.sendall(words)
        assert (end_of(link).code, link.is_foreign) == ("INTERNAL", False)
        assert other.recv(1) == b""
        other.close()


def test_a_status_that_says_ok_ends_the_session_too(peer: Peer) -> None:
    link, other = peer.greet()
    other.sendall(message_frame(pb.SessionResponse(gap=pb.SessionGap(expected_number=7))))
    other.sendall(frame(STATUS, status_pb2.Status().SerializeToString()))
    assert next_of(link).gap.expected_number == 7
    assert str(end_of(link)) == f"the KV manager at {peer.address} has ended the session"
    other.close()


def test_sending_never_waits_and_keeps_the_order(peer: Peer) -> None:
    """More than any buffer of the system takes: it goes out as soon as it is read, and what is said later behind it."""
    with no_thread_stays():
        link, other = peer.greet()
        sent = [pb.SessionRequest(holdings=pb.Holdings(lease_block_ids=bytes(size))) for size in (1 << 22, 9, 1 << 20)]
        for request in sent:
            link.send(request)
        reader, got = FrameReader(1 << 30), []
        while len(got) < len(sent):
            reader.feed(other.recv(1 << 16))
            while (found := reader.next()) is not None:
                got.append(pb.SessionRequest.FromString(found[1]))
        assert got == sent
        link.send(sent[1])
        assert other.recv(1 << 16) == message_frame(sent[1])
        link.close()
        other.close()


def test_a_link_with_unsent_words_is_closed_at_once(peer: Peer) -> None:
    with no_thread_stays():
        link, other = peer.greet()
        for _ in range(3):
            link.send(pb.SessionRequest(holdings=pb.Holdings(lease_block_ids=bytes(1 << 22))))
        link.close()
        link.send(pb.SessionRequest())
        end_of(link)
        other.close()
