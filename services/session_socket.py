"""Sessions over a Unix socket of their own, beside the KV manager's: what gRPC's threads and tasks cost, they save.

The books are called where the bytes come in, so that a message costs the event loop one turn. A runner that doesn't
read its answers is not read any more either; of many messages that come at once, one is handled in each turn.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, KvManagerStopping
from services.addresses import UnixAddress, parse_address, session_address
from services.config import KvManagerSettings
from services.errors import KV_DOMAIN, RpcFailure, StartupError, failure_of, kv_failure, to_status
from services.grpc_server import KV_MAX_RECEIVE_BYTES, for_the_owner, prepare
from services.rpc_interceptor import STATUS_SECONDS
from services.session_frames import (
    CONTRACT,
    GREETING,
    MESSAGE,
    STATUS,
    FrameFault,
    FrameReader,
    FrameTooLong,
    frame,
    message_frame,
)
from services.session_stream import SessionStream
from services.session_streams import SessionStreams

_BACKLOG: Final = 100
_UNREAD_BYTES: Final = 1 << 16
"""Of answers that the system has no room for; with more, the runner is not read."""

Observe = Callable[[str, float], None]
"""Told of each stream that has ended: by what status, by name, and after how many seconds."""


class SessionSocket:
    """The socket beside a KV manager's address. Bind it before that address: who finds that one finds this one then."""

    def __init__(self, address: UnixAddress) -> None:
        """Listens, and lets connections wait. Raises StartupError."""
        self.address = address
        prepare(address)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with for_the_owner(address):
                self._socket.bind(address.path)
            self._socket.listen(_BACKLOG)
            self._identity = _identity(address)
        except OSError as error:
            self._socket.close()
            raise StartupError(f"Cannot listen on {address}: {error.strerror}.") from None
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._none_left = asyncio.Event()

    async def serve(self, streams: SessionStreams, max_bytes: int, observe: Observe) -> None:
        """Takes connections. max_bytes: of one message."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _Connection(self._connections, self._note_end, streams, max_bytes, observe), sock=self._socket
        )

    async def stop(self) -> None:
        """Takes no more connections, and waits until those that have ended have taken their status."""
        self.close()
        if self._connections:
            self._none_left.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), STATUS_SECONDS)
        for connection in list(self._connections):
            connection.abort()

    def close(self) -> None:
        """Takes no more connections."""
        if self._server is not None:
            self._server.close()
        self._socket.close()
        with suppress(OSError):
            if _identity(self.address) == self._identity:
                os.unlink(self.address.path)

    def _note_end(self) -> None:
        if not self._connections:
            self._none_left.set()


def bind_session_socket(settings: KvManagerSettings) -> SessionSocket | None:
    """The socket beside the KV manager's address; None where there is to be none. Raises StartupError.

    It has no TLS: with TLS at the address, a socket beside it would be a way around the certificates.
    """
    beside = session_address(settings.kv_address) if settings.session_socket else None
    if beside is None or settings.server_tls() is not None:
        return None
    prepare(parse_address(settings.kv_address))
    return SessionSocket(beside)


def max_message_bytes(settings: KvManagerSettings) -> int:
    """Of one message of a session; the same as over gRPC."""
    return settings.max_request_bytes or KV_MAX_RECEIVE_BYTES


class _Connection(asyncio.Protocol):
    """One runner's connection. It ends with a frame that says why, unless the runner is gone."""

    def __init__(
        self,
        connections: set[_Connection],
        note_end: Callable[[], None],
        streams: SessionStreams,
        max_bytes: int,
        observe: Observe,
    ) -> None:
        self._connections = connections
        self._note_end = note_end
        self._streams = streams
        self._observe = observe
        self._frames = FrameReader(max_bytes)
        self._loop = asyncio.get_running_loop()
        self._began = time.perf_counter()
        self._stream: SessionStream | None = None
        self._is_full = False
        """Whether answers wait to be read."""
        self._code = grpc.StatusCode.CANCELLED.name
        self._closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections.add(self)
        transport.set_write_buffer_limits(_UNREAD_BYTES)
        transport.write(frame(GREETING, CONTRACT))
        try:
            self._stream = self._streams.begin(self._wake)
        except KvManagerStopping as error:
            self._finish(error)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        self._take_next()

    def eof_received(self) -> bool:
        """The runner says no more. All that it has said is answered: more is read only then."""
        self._finish(None)
        return True

    def pause_writing(self) -> None:
        self._is_full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        self._loop.call_soon(self._take_next)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._note_end()
        if self._closing is not None:
            self._closing.cancel()
        self._end_stream(None)
        # A runner that is gone says as much as one that has nothing more to say: its status then can't be written.
        code = self._code if error is None else grpc.StatusCode.CANCELLED.name
        self._observe(code, time.perf_counter() - self._began)

    def abort(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()

    def _take_next(self) -> None:
        """Handles the next message, if all of it has come and answers are read; lets others have their turn before
        the one behind it."""
        if self._stream is None or self._is_full:
            return
        try:
            if (received := self._frames.next()) is not None:
                self._stream.hear()
                self._streams.receive(self._stream, _request(*received), self._say)
        except Exception as error:
            self._finish(error)
            return
        if self._frames.has_next:
            self._transport.pause_reading()
            self._loop.call_soon(self._take_next)
        elif not self._is_full:
            self._transport.resume_reading()

    def _say(self, answer: pb.SessionResponse) -> None:
        self._transport.write(message_frame(answer))

    def _wake(self) -> None:
        self._loop.call_soon(self._fail)

    def _fail(self) -> None:
        if self._stream is not None:
            self._finish(self._stream.failure)

    def _finish(self, error: BaseException | None) -> None:
        """Ends the stream, says why, and hangs up when that is read, or soon."""
        if self._closing is not None:
            return
        self._end_stream(error)
        status = _status(error)
        self._code = _code_name(status.code)
        self._transport.write(frame(STATUS, status.SerializeToString()))
        self._transport.close()
        self._closing = self._loop.call_later(STATUS_SECONDS, self._transport.abort)

    def _end_stream(self, error: BaseException | None) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._streams.end(stream, error)


def _request(kind: int, payload: bytes) -> pb.SessionRequest:
    """The message of a frame. Raises InvalidArgument for what is none."""
    if kind == MESSAGE:
        with suppress(DecodeError):
            request: pb.SessionRequest = pb.SessionRequest.FromString(payload)
            return request
    raise _malformed()


def _malformed() -> InvalidArgument:
    return InvalidArgument("a message of the session is not well-formed", field="message")


def _status(error: BaseException | None) -> status_pb2.Status:
    """The status that the end of a stream means; OK for none."""
    if error is None:
        return status_pb2.Status()
    return to_status(failure_of(error, _failure, KV_DOMAIN, CONTRACT.decode()))


def _failure(error: BaseException) -> RpcFailure | None:
    if isinstance(error, FrameTooLong):
        # As gRPC says it: without a reason, which would be a word about the books.
        return RpcFailure(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), "", KV_DOMAIN)
    return kv_failure(_malformed() if isinstance(error, FrameFault) else error)


def _code_name(number: int) -> str:
    return next(str(code.name) for code in grpc.StatusCode if code.value[0] == number)


def _identity(address: UnixAddress) -> tuple[int, int]:
    found = os.lstat(address.path)
    return found.st_dev, found.st_ino
