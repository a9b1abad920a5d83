"""From the engine's thread to the event loop: the chunks of a step cross once, and each stream gets its own.

A client that reads more slowly than the engine writes gets fewer and larger chunks. When too much waits for it, its
request pauses, and goes on once it has read most of that; so what it does not read takes a bounded piece of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from model_runner.engine_types import DuplicateRequest, EngineStopped, Failure, FailureKind
from model_runner.request import Chunk
from services.chunk_merge import entries, merged
from services.reader_limits import CHUNK_ENTRIES, MAX_UNREAD, RESUME_SHARE
from services.runner_errors import FormStuck, NotReady, PinsExhausted, RequestFailed, RequestRefused

_FAILURES = {
    FailureKind.ENGINE: RequestFailed,
    FailureKind.ELSEWHERE: NotReady,
    FailureKind.REQUEST: RequestRefused,
    FailureKind.PINS_EXHAUSTED: PinsExhausted,
    FailureKind.FORM: FormStuck,
    FailureKind.NAME_TAKEN: DuplicateRequest,
    FailureKind.STOPPING: EngineStopped,
}

Throttle = Callable[[bool], None]
"""Pauses the request of a stream (true), or lets it go on (false)."""


def _run_on(paused: bool) -> None:
    """The throttle of a request that never pauses."""


class Stream:
    """The chunks of one request, up to its last. Belongs to the event loop."""

    def __init__(self, request_id: str, throttle: Throttle = _run_on, max_unread: int = MAX_UNREAD) -> None:
        self.request_id = request_id
        self.ended = False
        """Whether the engine is done with the request."""
        self.closed = False
        """Whether nobody reads any more."""
        self._throttle = throttle
        self._max_unread = max_unread
        self._chunks: deque[Chunk] = deque()
        self._failure: Failure | None = None
        self._arrived = asyncio.Event()
        self._paused = False
        self.unread = 0
        """Entries of the chunks that nobody has taken."""

    def put(self, item: Chunk | Failure) -> None:
        """Takes an item from the engine."""
        self._arrived.set()
        if isinstance(item, Failure):
            self.ended, self._failure = True, item
            return
        self.ended = self.ended or item.usage is not None
        if self.closed:
            return
        self._chunks.append(item)
        self.unread += entries(item)
        if self.unread > self._max_unread and not (self._paused or self.ended):
            self._paused = True
            self._throttle(True)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Raises RequestFailed, RequestRefused, PinsExhausted, FormStuck, NotReady, DuplicateRequest, EngineStopped."""
        while True:
            await self._arrived.wait()
            for chunk in merged(self._take()):
                yield chunk
                if chunk.usage is not None:
                    return
            if self._failure is not None and not self._chunks:
                raise _FAILURES[self._failure.kind](self._failure.sentence)

    def close(self) -> None:
        """Forgets what nobody will read."""
        self.closed = True
        self._chunks.clear()
        self.unread = 0

    def _take(self) -> list[Chunk]:
        """The oldest chunks, of CHUNK_ENTRIES or a little more."""
        taken: list[Chunk] = []
        size = 0
        while self._chunks and size < CHUNK_ENTRIES:
            taken.append(self._chunks.popleft())
            size += entries(taken[-1])
        self.unread -= size
        if not self._chunks and self._failure is None:
            self._arrived.clear()
        if self._paused and self.unread <= self._max_unread // RESUME_SHARE:
            self._paused = False
            self._throttle(False)
        return taken


class Streams:
    """The streams of a runner, by request id. All but deliver() belong to the event loop.

    The engine speaks of a request by its id, and may have its last word on the way when it lets another one of the same
    id in. So a stream stays here until that word has come, also when its client has gone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_unread: int = MAX_UNREAD) -> None:
        self._loop = loop
        self._max_unread = max_unread
        self._open: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._open)

    def deliver(self, items: Sequence[Chunk | Failure]) -> None:
        """Hands a step's chunks over; called from the engine's thread, wakes the loop once."""
        try:
            self._loop.call_soon_threadsafe(self._distribute, items)
        except RuntimeError:
            # The loop is closed: the process ends, and nobody listens any more.
            return

    def check_free(self, request_id: str) -> None:
        """Raises DuplicateRequest while the engine has not had its last word on another request of this id."""
        known = self._open.get(request_id)
        if known is not None and not known.ended:
            raise DuplicateRequest(f"request {request_id!r} is live already; take another id")

    def open(self, request_id: str, throttle: Throttle = _run_on) -> Stream:
        """The stream of a request that has just been submitted under a free id; `throttle` pauses it."""
        stream = self._open[request_id] = Stream(request_id, throttle, self._max_unread)
        return stream

    def close(self, stream: Stream) -> None:
        """Nobody reads a stream any more; what still comes for it is ignored."""
        stream.close()
        self._forget_if_over(stream)

    def _forget_if_over(self, stream: Stream) -> None:
        # A request of the same id may have begun since this one ended: that one's stream stays.
        if stream.ended and stream.closed and self._open.get(stream.request_id) is stream:
            del self._open[stream.request_id]

    def _distribute(self, items: Sequence[Chunk | Failure]) -> None:
        for item in items:
            stream = self._open.get(item.request_id)
            if stream is not None:
                stream.put(item)
                self._forget_if_over(stream)
