"""One runner's open stream, whatever carries it: its session, when it was heard last, and why it has to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvmanager.errors import KvError, SessionSilent
from services.presence import LAPSING_SHARE, PoolSession, Presence
from services.session_core import SessionCore

STALL_SECONDS: Final = 1.0
"""A silence that ends so much too late was this process's own: it was stopped, and could not listen."""


class SessionStream:
    """Lives on the running event loop.

    tell: called with the pool's id when a silence has become long, and when it is over. wake: called once there is a
    failure; it must not end the stream before it returns, for the books may be in the middle of another's opening.
    """

    def __init__(
        self, core: SessionCore, silence_seconds: float, tell: Callable[[str], None], wake: Callable[[], None]
    ) -> None:
        self.core = core
        self.failure: KvError | None = None
        """Why the stream has to end."""
        self._silence_seconds = silence_seconds
        self._lapsing_seconds = LAPSING_SHARE * silence_seconds
        self._tell = tell
        self._wake = wake
        self._lapsing = False
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        """When the runner was heard last, or this process was found to have been unable to hear it."""
        self._timer = self._watch(self._heard + self._lapsing_seconds)

    def hear(self) -> None:
        """Notes that a message of the runner has come."""
        self._heard = self._loop.time()
        if self._lapsing:
            self._lapse(False)

    def fail(self, failure: KvError) -> None:
        """Says why the stream has to end; the first failure counts."""
        if self.failure is None:
            self.failure = failure
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
