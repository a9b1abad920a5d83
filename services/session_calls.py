"""Sessions over gRPC: each call of the verb Session has an inbox, so that messages and failures come to one place.

A runner that doesn't read its answers is not read any more either, and holds up nobody else: what waits of it is its
inbox and what gRPC keeps for one stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import structlog
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.session_stream import SessionStream
from services.session_streams import SessionStreams

INBOX_MESSAGES: Final = 8
"""Messages of one runner that wait; it sends one for each step, and looks at the answers."""


async def serve_call(streams: SessionStreams, requests: AsyncIterator[object]) -> AsyncIterator[pb.SessionResponse]:
    """Answers one runner until its stream ends. Raises why it has to end before."""
    inbox = Inbox()
    stream = streams.begin(inbox.wake)
    pump = asyncio.create_task(inbox.fill(stream, requests))
    pump.add_done_callback(inbox.filled)
    failure: BaseException | None = None
    try:
        while (request := await inbox.next(stream)) is not None:
            answers: list[pb.SessionResponse] = []
            # All is written down before anybody else has a turn.
            streams.receive(stream, request, answers.append)
            for answer in answers:
                yield answer
    except BaseException as error:
        failure = error
        raise
    finally:
        pump.cancel()
        streams.end(stream, failure)


class Inbox:
    """Messages of one runner that wait, and the word that no more will come."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[object] = asyncio.Queue(INBOX_MESSAGES)
        self._all_said = False

    async def fill(self, stream: SessionStream, requests: AsyncIterator[object]) -> None:
        """Moves messages into the inbox, as long as there is room."""
        async for request in requests:
            stream.hear()
            await self._messages.put(request)

    def filled(self, fill: asyncio.Task[None]) -> None:
        """The runner says no more, or its connection is gone: what is in the inbox is the last of it."""
        if not fill.cancelled() and (error := fill.exception()) is not None:
            structlog.get_logger().debug("session stream lost", error=repr(error))
        self._all_said = True
        self.wake()

    async def next(self, stream: SessionStream) -> object:
        """The next message; None at the end of the stream. Raises the stream's failure."""
        if self._all_said and self._messages.empty() and stream.failure is None:
            return None
        message = await self._messages.get()
        if stream.failure is not None:
            raise stream.failure
        return message

    def wake(self) -> None:
        """Lets next() look, if it waits."""
        if self._messages.empty():
            self._messages.put_nowait(None)
