"""The open Session streams of a KV manager: each has an inbox of its own, and ends for one of a few causes.

A runner that doesn't read its answers is not read any more either, and holds up nobody else: what waits of it is its
inbox and what gRPC keeps for one stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Final

import structlog
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, KvError, KvManagerStopping, SessionSilent, SessionTaken, UnknownPool
from kvmanager.manager import KvManager
from services.presence import LAPSING_SHARE, NO_SESSION, PoolSession, Presence
from services.session_core import SessionCore, SessionCounts

SILENCE_SECONDS: Final = 10.0

INBOX_MESSAGES: Final = 8
"""Messages of one runner that wait; it sends one for each step, and looks at the answers."""

STALL_SECONDS: Final = 1.0
"""A silence that ends so much too late was this process's own: it was stopped, and could not listen."""

_CAUSES: Final[dict[type[BaseException], str]] = {
    asyncio.CancelledError: "stream",
    GeneratorExit: "stream",
    SessionSilent: "silence",
    SessionTaken: "taken",
    UnknownPool: "closed",
    KvManagerStopping: "stopping",
}
CAUSES: Final = (*dict.fromkeys(_CAUSES.values()), "error")
"""Why sessions end."""


class SessionStreams:
    """All streams of one KV manager; they live on one event loop. Install it before the first one comes.

    observe: told the seconds that each step message took in the books.
    """

    def __init__(
        self,
        manager: KvManager,
        silence_seconds: float = SILENCE_SECONDS,
        observe: Callable[[float], None] | None = None,
    ) -> None:
        self.counts = SessionCounts()
        self.ended = dict.fromkeys(CAUSES, 0)
        """Sessions that have ended, by cause."""
        self._manager = manager
        self._silence_seconds = silence_seconds
        self._observe = observe
        self._streams: set[_Stream] = set()
        self._stopping = False
        self._none_left = asyncio.Event()
        """Set when the last stream has ended."""
        self._told: dict[str, Presence] = {}
        self._listener: Callable[[str, Presence | None], None] | None = None
        manager.on_epoch_over = self._end_those_of

    def __len__(self) -> int:
        """Sessions that are open; any thread may ask."""
        return self.counts.opened - sum(self.ended.values())

    def session_of(self, pool_id: str) -> PoolSession:
        """How the session of an open pool is now."""
        for stream in self._streams:
            if stream.core.pool_id == pool_id and stream.is_alive:
                return stream.state()
        return NO_SESSION

    def listen(self, listener: Callable[[str, Presence | None], None]) -> None:
        """Lets one listener know of each pool's session, now and at each change; None: the pool is gone."""
        self._listener = listener
        for pool_id, presence in self._told.items():
            listener(pool_id, presence)

    async def serve(self, requests: AsyncIterator[object]) -> AsyncIterator[pb.SessionResponse]:
        """Answers one runner until its stream ends. Raises why it has to end before."""
        if self._stopping:
            raise KvManagerStopping("the KV manager is stopping; open the session again at the one that follows")
        core = SessionCore(self._manager, self.counts, self._silence_seconds)
        stream = _Stream(core, self._silence_seconds, self._tell)
        self._streams.add(stream)
        pump = asyncio.create_task(stream.pump(requests))
        pump.add_done_callback(stream.pump_ended)
        cause = "stream"
        try:
            while (request := await stream.next()) is not None:
                for answer in self._receive(stream.core, request):
                    yield answer
        except BaseException as error:
            cause = _CAUSES.get(type(error), "error")
            raise
        finally:
            pump.cancel()
            stream.close()
            self._streams.discard(stream)
            self._end(stream.core, cause)
            if not self._streams:
                self._none_left.set()

    async def drain(self, grace_seconds: float) -> None:
        """Takes no new sessions, because the process stops, and waits until the runners have ended theirs.

        Those that are open after grace_seconds it ends. A runner that is told to stop at the same time can so finish
        what it has, be it of requests that hold nothing at the moment.
        """
        self._stopping = True
        self._none_left.clear()
        if self._streams:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), grace_seconds)
        for stream in self._streams:
            stream.fail(KvManagerStopping("the KV manager is stopping; open the session again at the one that follows"))

    def _receive(self, core: SessionCore, request: object) -> list[pb.SessionResponse]:
        if not isinstance(request, pb.SessionRequest):
            raise InvalidArgument("a message of the session is not well-formed", field="message")
        if not request.HasField("step"):
            answers = core.receive(request)
            self._tell(core.pool_id)
            return answers
        if self._observe is None:
            return core.receive(request)
        loop = asyncio.get_running_loop()
        start = loop.time()
        answers = core.receive(request)
        self._observe(loop.time() - start)
        return answers

    def _end(self, core: SessionCore, cause: str) -> None:
        if not core.epoch:
            return
        self.ended[cause] += 1
        core.end()
        self._tell(core.pool_id)
        structlog.get_logger().info(
            "session ended",
            pool=core.pool_id,
            epoch=core.epoch,
            cause=cause,
            closed_sequences=core.closed_sequences,
        )

    def _end_those_of(self, pool_id: str) -> None:
        """The pool was opened anew or closed: sessions of earlier openings are over."""
        for stream in self._streams:
            if stream.core.epoch and stream.core.pool_id == pool_id:
                stream.check_alive()
        self._tell(pool_id)

    def _tell(self, pool_id: str) -> None:
        """Tells whoever listens of a pool's session, if there is news."""
        known = self._manager.knows(pool_id)
        presence = self.session_of(pool_id).presence if known else None
        if presence is self._told.get(pool_id):
            return
        if presence is None:
            del self._told[pool_id]
        else:
            self._told[pool_id] = presence
        if self._listener is not None:
            self._listener(pool_id, presence)


class _Stream:
    """One runner's stream: its session, its inbox, when it was heard last, and why it has to end, if it has to.

    tell: called with the pool's id when a silence has become long, and when it is over.
    """

    def __init__(self, core: SessionCore, silence_seconds: float, tell: Callable[[str], None]) -> None:
        self.core = core
        self._silence_seconds = silence_seconds
        self._lapsing_seconds = LAPSING_SHARE * silence_seconds
        self._tell = tell
        self._lapsing = False
        self._inbox: asyncio.Queue[object] = asyncio.Queue(INBOX_MESSAGES)
        self._all_said = False
        self._failure: KvError | None = None
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        """When the runner was heard last, or this process was found to have been unable to hear it."""
        self._timer = self._watch(self._heard + self._lapsing_seconds)

    async def pump(self, requests: AsyncIterator[object]) -> None:
        """Moves messages into the inbox, as long as there is room."""
        async for request in requests:
            self._heard = self._loop.time()
            if self._lapsing:
                self._lapse(False)
            await self._inbox.put(request)

    def pump_ended(self, pump: asyncio.Task[None]) -> None:
        """The runner says no more, or its connection is gone: what is in the inbox is the last of it."""
        if not pump.cancelled() and (error := pump.exception()) is not None:
            structlog.get_logger().debug("session stream lost", error=repr(error))
        self._all_said = True
        self._wake()

    async def next(self) -> object:
        """The next message; None at the end of the stream. Raises what the stream was failed with."""
        if self._all_said and self._inbox.empty() and self._failure is None:
            return None
        message = await self._inbox.get()
        if self._failure is not None:
            raise self._failure
        return message

    def fail(self, failure: KvError) -> None:
        """Lets next() raise a failure; the first one counts."""
        self._failure = self._failure or failure
        self._wake()

    @property
    def is_alive(self) -> bool:
        """Whether the session is the one that speaks for its pool."""
        return self.core.epoch > 0 and self.core.is_alive

    def state(self) -> PoolSession:
        """How the session is, as long as it is alive."""
        silent = max(0.0, self._loop.time() - self._heard)
        if self._lapsing:
            return PoolSession(Presence.LAPSING, silent)
        return PoolSession(Presence.RESTORING if self.core.restores else Presence.CONNECTED, silent)

    def check_alive(self) -> None:
        """Fails the stream if its session was ended from elsewhere."""
        try:
            self.core.check_alive()
        except KvError as error:
            self.fail(error)

    def close(self) -> None:
        """Stops the watch for silence."""
        self._timer.cancel()

    def _wake(self) -> None:
        """Lets next() look, if it waits."""
        if self._inbox.empty():
            self._inbox.put_nowait(None)

    def _watch(self, due: float) -> asyncio.TimerHandle:
        return self._loop.call_at(due, self._look, due)

    def _look(self, due: float) -> None:
        """Notes a silence, and ends the session after a longer one.

        Its blocks come back at once, even while an answer can't be written.
        """
        now = self._loop.time()
        if now - due > STALL_SECONDS:
            self._heard = now
        silent = now - self._heard
        if silent >= self._silence_seconds:
            self.core.end()
            self.fail(SessionSilent(f"nothing was heard of the runner for {self._silence_seconds:g} s"))
            self._tell(self.core.pool_id)
            return
        is_long = silent >= self._lapsing_seconds
        self._timer = self._watch(self._heard + (self._silence_seconds if is_long else self._lapsing_seconds))
        if is_long is not self._lapsing:
            self._lapse(is_long)

    def _lapse(self, lapsing: bool) -> None:
        self._lapsing = lapsing
        self._tell(self.core.pool_id)
