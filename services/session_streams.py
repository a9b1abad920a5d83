"""The open Session streams of a KV manager, whatever carries them: who speaks for which pool, and why streams end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, KvManagerStopping, SessionSilent, SessionTaken, UnknownPool
from kvmanager.manager import KvManager
from services.presence import NO_SESSION, PoolSession, Presence
from services.session_core import Say, SessionCore, SessionCounts
from services.session_stream import SessionStream

SILENCE_SECONDS: Final = 10.0

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

    Whoever carries a stream begins it, hands each message to receive(), and ends it once: with what receive() raised,
    with the stream's failure, or with None when the runner has said all or is gone.

    observe: told the seconds that each step message took in the books, the sending of its answer included.
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
        self._streams: set[SessionStream] = set()
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

    def begin(self, wake: Callable[[], None]) -> SessionStream:
        """A new stream. wake: called once it has to end for a failure of its own. Raises KvManagerStopping."""
        if self._stopping:
            raise _stopping()
        core = SessionCore(self._manager, self.counts, self._silence_seconds)
        stream = SessionStream(core, self._silence_seconds, self._tell, wake)
        self._streams.add(stream)
        return stream

    def receive(self, stream: SessionStream, request: object, say: Say) -> None:
        """Takes the next message of a stream, and says what there is to answer. Raises why the stream has to end."""
        core = stream.core
        if not isinstance(request, pb.SessionRequest):
            raise InvalidArgument("a message of the session is not well-formed", field="message")
        start = time.perf_counter()
        core.receive(request, say)
        if not request.HasField("step"):
            self._tell(core.pool_id)
        elif self._observe is not None:
            self._observe(time.perf_counter() - start)

    def end(self, stream: SessionStream, error: BaseException | None = None) -> None:
        """Ends a stream, and its session with it."""
        stream.close()
        self._streams.discard(stream)
        self._end_session(stream.core, "stream" if error is None else _CAUSES.get(type(error), "error"))
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
            stream.fail(_stopping())

    def _end_session(self, core: SessionCore, cause: str) -> None:
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


def _stopping() -> KvManagerStopping:
    return KvManagerStopping("the KV manager is stopping; open the session again at the one that follows")
