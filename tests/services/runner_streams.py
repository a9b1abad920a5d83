"""A runner's end of a Session, message by message, over gRPC and over the socket: what the tests of both have."""

from __future__ import annotations

import queue
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import grpc
import pytest
from google.rpc import status_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.addresses import session_address
from services.channels import open_channel
from services.errors import RpcErrorView, describe_rpc_error, view_of_status
from services.session_frames import CONTRACT, GREETING, MESSAGE, STATUS, FrameReader, frame, message_frame
from tests.services.kv_support import WAIT_SECONDS

Stub = kv_manager_pb2_grpc.KvManagerServiceStub
WAYS = ("grpc", "socket")


class Stream(Protocol):
    """A stream that a test speaks on."""

    def tell(self, message: pb.SessionRequest) -> None:
        """Says something, and waits for nothing."""

    def tell_bytes(self, message: bytes) -> None:
        """The same of bytes that may be no message."""

    def say(self, message: pb.SessionRequest) -> pb.SessionResponse:
        """Says something, and returns the next answer."""

    def finish(self) -> list[pb.SessionResponse]:
        """Says that no more is said, and returns what still comes before the status OK."""

    def failure(self) -> RpcErrorView:
        """Why the stream ends."""

    def has_ended(self) -> bool:
        """Whether its status is there."""

    def cancel(self) -> None:
        """Ends the stream."""

    def lose(self) -> None:
        """Ends the connection."""


Dial = Callable[[], Stream]


def dial_by(way: str, address: str) -> Dial:
    """How to begin streams at a KV manager's address, one of WAYS."""
    return partial(GrpcStream if way == "grpc" else SocketStream, address)


class GrpcStream:
    """Each has a connection of its own."""

    def __init__(self, address: str) -> None:
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(address)
        begin = self._channel.stream_stream(
            f"/{CONTRACT.decode()}", response_deserializer=pb.SessionResponse.FromString
        )
        self._call = begin(iter(self._said.get, None), timeout=WAIT_SECONDS)

    def tell(self, message: pb.SessionRequest) -> None:
        self.tell_bytes(message.SerializeToString())

    def tell_bytes(self, message: bytes) -> None:
        self._said.put(message)

    def say(self, message: pb.SessionRequest) -> pb.SessionResponse:
        self.tell(message)
        return next(self._call)

    def finish(self) -> list[pb.SessionResponse]:
        self._said.put(None)
        rest = list(self._call)
        assert self._call.code() is grpc.StatusCode.OK
        self._channel.close()
        return rest

    def failure(self) -> RpcErrorView:
        with pytest.raises(grpc.RpcError) as error:
            for _ in self._call:
                pass
        self._said.put(None)
        self._channel.close()
        return describe_rpc_error(error.value)

    def has_ended(self) -> bool:
        return bool(self._call.done())

    def cancel(self) -> None:
        self._call.cancel()

    def lose(self) -> None:
        self._channel.close()


class SocketStream:
    """Written apart from services.session.socket_link: the other end of the same frames."""

    def __init__(self, address: str) -> None:
        beside = session_address(address)
        assert beside is not None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(WAIT_SECONDS)
        self._socket.connect(beside.path)
        self._reader = FrameReader(1 << 30)
        self._status: status_pb2.Status | None = None
        self._is_broken = False
        assert self._frame() == (GREETING, CONTRACT)

    def tell(self, message: pb.SessionRequest) -> None:
        self.tell_raw(message_frame(message))

    def tell_bytes(self, message: bytes) -> None:
        self.tell_raw(frame(MESSAGE, message))

    def tell_raw(self, data: bytes) -> None:
        """Bytes that may be no frame. Why the other end has hung up, if it has, is still to be read."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def fill(self, data: bytes) -> None:
        """Says the same again and again, until the other end has taken nothing for a while."""
        with suppress(OSError):
            while select.select([], [self._socket], [], 0.2)[1]:
                self._socket.sendall(data)

    def say(self, message: pb.SessionRequest) -> pb.SessionResponse:
        self.tell(message)
        return self._next_message()

    def finish(self) -> list[pb.SessionResponse]:
        self._socket.shutdown(socket.SHUT_WR)
        rest = self._rest()
        assert self._status == status_pb2.Status()
        self._socket.close()
        return rest

    def failure(self) -> RpcErrorView:
        self._rest()
        self._socket.close()
        if self._status is None:
            return RpcErrorView("UNAVAILABLE", "", "", {})
        return view_of_status(self._status)

    def has_ended(self) -> bool:
        while self._status is None and not self._is_broken and select.select([self._socket], [], [], 0)[0]:
            self._read_more()
        return self._status is not None or self._is_broken

    def cancel(self) -> None:
        self.lose()

    def lose(self) -> None:
        # A thread that waits in it learns of it so, and not by close() alone.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next_message(self) -> pb.SessionResponse:
        found = self._frame()
        assert found is not None
        kind, payload = found
        assert kind == MESSAGE, status_pb2.Status.FromString(payload)
        return pb.SessionResponse.FromString(payload)

    def _rest(self) -> list[pb.SessionResponse]:
        """The messages before the status; nothing comes behind it."""
        rest: list[pb.SessionResponse] = []
        while (found := self._frame()) is not None:
            assert self._status is None
            if found[0] == STATUS:
                self._status = status_pb2.Status.FromString(found[1])
            else:
                rest.append(pb.SessionResponse.FromString(found[1]))
        return rest

    def _frame(self) -> tuple[int, bytes] | None:
        """The next frame; None at the end of the connection."""
        while (found := self._reader.next()) is None:
            if not self._read_more():
                return None
        return found

    def _read_more(self) -> bool:
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        self._is_broken = not data
        self._reader.feed(data)
        return bool(data)
