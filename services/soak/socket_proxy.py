"""Between a runner and its KV manager at the socket for sessions: passes frames on, and lets faults happen to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from services.addresses import UnixAddress
from services.session_frames import MESSAGE, FrameReader, frame
from services.soak.message_faults import MessageFaults, is_answer, is_step

_READ_BYTES: Final = 1 << 16
_MAX_BYTES: Final = 1 << 30

Frame = tuple[int, bytes]


class SocketProxy:
    """Listens at `listen`, and dials `upstream` for each connection. Lives on one event loop."""

    def __init__(self, listen: UnixAddress, upstream: UnixAddress, faults: MessageFaults) -> None:
        self._listen = listen
        self._upstream = upstream
        self._faults = faults
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_unix_server(self._serve, self._listen.path)

    async def stop(self) -> None:
        """Ends what is open."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections.add(connection)
        try:
            await self._pass(reader, writer)
        finally:
            self._connections.discard(connection)
            writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one of both ends hangs up, or the session is cut. Nobody at the other end is as if it had hung up."""
        try:
            from_manager, to_manager = await asyncio.open_unix_connection(self._upstream.path)
        except OSError:
            return
        up = asyncio.create_task(self._faults.carry(_frames(reader), _put_to(to_manager), _is_step))
        down = asyncio.create_task(self._faults.carry(_frames(from_manager), _put_to(writer), _is_answer))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            if up.done() and not up.result():
                # The runner says no more; the KV manager may.
                to_manager.write_eof()
                await down
        finally:
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            to_manager.close()


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[Frame]:
    """What comes, until the connection ends."""
    frames = FrameReader(_MAX_BYTES)
    while data := await _read(reader):
        frames.feed(data)
        while (found := frames.next()) is not None:
            yield found


async def _read(reader: asyncio.StreamReader) -> bytes:
    """What has come; nothing when the connection has ended, in whatever way."""
    try:
        return await reader.read(_READ_BYTES)
    except OSError:
        return b""


def _put_to(writer: asyncio.StreamWriter) -> Callable[[Frame], None]:
    def put(found: Frame) -> None:
        # Whom it was meant for may be gone by now.
        if not writer.is_closing():
            writer.write(frame(*found))

    return put


def _is_step(found: Frame) -> bool:
    return found[0] == MESSAGE and is_step(found[1])


def _is_answer(found: Frame) -> bool:
    return found[0] == MESSAGE and is_answer(found[1])
