"""From the engine's thread to the event loop: the chunks of a step cross once, and each stream gets its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from model_runner.engine_types import DuplicateRequest, Failure, FailureKind
from model_runner.request import Chunk
from services.runner_errors import FormStuck, NotReady, PinsExhausted, RequestFailed, RequestRefused

_FAILURES = {
    FailureKind.ENGINE: RequestFailed,
    FailureKind.ELSEWHERE: NotReady,
    FailureKind.REQUEST: RequestRefused,
    FailureKind.PINS_EXHAUSTED: PinsExhausted,
    FailureKind.FORM: FormStuck,
    FailureKind.NAME_TAKEN: DuplicateRequest,
}


class Stream:
    """The chunks of one request, up to its last. Belongs to the event loop."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.ended = False
        """Whether the engine is done with the request."""
        self._queue: asyncio.Queue[Chunk | Failure] = asyncio.Queue()

    def put(self, item: Chunk | Failure) -> None:
        """Takes an item from the engine."""
        self.ended = self.ended or isinstance(item, Failure) or item.usage is not None
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Raises RequestFailed, RequestRefused, PinsExhausted, FormStuck, NotReady, DuplicateRequest."""
        while True:
            item = await self._queue.get()
            if isinstance(item, Failure):
                raise _FAILURES[item.kind](item.sentence)
            yield item
            if item.usage is not None:
                return


class Streams:
    """The open streams of a runner, by request id. All but deliver() belong to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[str, Stream] = {}

    def deliver(self, items: Sequence[Chunk | Failure]) -> None:
        """Hands a step's chunks over; called from the engine's thread, wakes the loop once."""
        try:
            self._loop.call_soon_threadsafe(self._distribute, items)
        except RuntimeError:
            # The loop is closed: the process ends, and nobody listens any more.
            return

    def open(self, request_id: str) -> Stream:
        """The stream of a request that has just been submitted."""
        stream = self._open[request_id] = Stream(request_id)
        return stream

    def close(self, stream: Stream) -> None:
        """Drops a stream; what still comes for it is ignored."""
        # A request of the same id may have begun since this one ended: that one's stream stays.
        if self._open.get(stream.request_id) is stream:
            del self._open[stream.request_id]

    def _distribute(self, items: Sequence[Chunk | Failure]) -> None:
        for item in items:
            stream = self._open.get(item.request_id)
            if stream is not None:
                stream.put(item)
