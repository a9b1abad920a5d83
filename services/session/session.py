"""The life of a session: it connects, opens the pool or restores it, exchanges messages, breaks, and begins again."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from octavo.kv.v1 import kv_manager_pb2 as pb

from model_runner.books import BooksLost, BooksRefused, BooksTaken
from services.session.exchange import AnswersLost, Exchange
from services.session.limits import SessionLimits
from services.session.link import Dial, Link, LinkBroken
from services.session.mirror import BrokenMirror, Mirror
from services.session.punctuality import Punctuality
from services.session.report import holdings

_LASTING = frozenset({"POOL_DIFFERS"})
"""Why a report may be refused although it is right: the operator must change something."""


class SessionWatch(Protocol):
    """Told how the session does, in the engine's thread; must be quick and must not raise."""

    def on_wait(self, seconds: float) -> None:
        """After the scheduling of a step that waited for answers: how long in all."""
        ...

    def on_round_trip(self, seconds: float) -> None:
        """When a message was answered."""
        ...


class SilentWatch:
    """Takes no notice."""

    def on_wait(self, seconds: float) -> None:
        pass

    def on_round_trip(self, seconds: float) -> None:
        pass


class SessionState(Enum):
    """Whether the KV manager can be asked."""

    UP = "up"
    AWAY = "away"
    RESTORING = "restoring"


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What an operator wants to know. away_seconds is 0 while the session is up; totals count since the start."""

    state: SessionState
    away_seconds: float
    lease_blocks: int
    taken_blocks: int
    restores: int
    resends: int


@dataclass(slots=True)
class _Attempt:
    """A link, and how far it has come. `since` is in seconds of the owner's clock."""

    link: Link
    since: float
    greeted: bool = False
    exchange: Exchange | None = None


class Session:
    """One Session stream at a time over a mirror. Used by one thread, but for beat() and status().

    pump() takes in what has come and does what is due; it raises what the engine must know of: BooksTaken,
    BooksRefused (before anything is held), BooksLost (the KV manager would not take the report: nothing is held any
    more).
    """

    def __init__(
        self,
        dial: Dial,
        mirror: Mirror,
        opening: pb.SessionOpen,
        limits: SessionLimits,
        watch: SessionWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mirror = mirror
        self.limits = limits
        self.clock = clock
        self.punctuality = Punctuality()
        self.why = "the KV manager was not asked yet"
        """Why the session is not up, in a sentence."""
        self._dial = dial
        self._opening = opening
        self._opening.runner_id = uuid.uuid4().hex
        self._watch = watch
        self._attempt: _Attempt | None = None
        self._epoch = 0
        self._retry_at = clock()
        self._away_since = clock()
        self._error: Exception | None = None
        self._restores = 0
        self._resends = 0
        self._stopped = threading.Event()
        if limits.beat:
            threading.Thread(target=self._beat_on, name="octavo-heartbeat", daemon=True).start()

    @property
    def exchange(self) -> Exchange | None:
        """The messages of the session that is up; None while none is."""
        attempt = self._attempt
        return attempt.exchange if attempt else None

    @property
    def is_connected(self) -> bool:
        """Whether the opening was sent, so that pump() can wait for something."""
        attempt = self._attempt
        return attempt is not None and attempt.greeted

    @property
    def is_late(self) -> bool:
        """Whether waiting is of no use: no session is up, or an answer is due for longer than anybody should wait."""
        exchange = self.exchange
        return exchange is None or exchange.oldest(self.clock()) > self.limits.ask

    def pump(self, seconds: float = 0.0) -> None:
        """Takes in what has come, waiting at most so many seconds for the first of it, and looks after the session."""
        if self._error is None:
            try:
                self._advance(seconds)
            except (LinkBroken, AnswersLost, BrokenMirror) as error:
                self.give_up(error)
        due = self._error
        if due is None:
            return
        # A pool that another runner has is never taken back.
        if not isinstance(due, BooksTaken):
            self._error = None
        raise due

    def send(self) -> None:
        """Says what there is to say, if it may be said now."""
        exchange = self.exchange
        if exchange is not None and self.mirror.has_orders and exchange.waiting < self.limits.max_unanswered:
            exchange.step(self.mirror, self.clock())

    def give_up(self, error: LinkBroken | AnswersLost | BrokenMirror) -> None:
        """Ends the stream; the next one begins with a report of what is held."""
        attempt, self._attempt = self._attempt, None
        now = self.clock()
        self._retry_at = now + self.limits.retry
        self.why = str(error)
        was_up = attempt is not None and attempt.exchange is not None
        if attempt is not None:
            attempt.link.close()
        if attempt is not None and attempt.exchange is not None:
            self._resends += attempt.exchange.resends
            self._away_since = now
        self.mirror.silence()
        if isinstance(error, LinkBroken) and error.reason:
            self._error = self._meaning(error, was_up)

    def settle(self, seconds: float) -> None:
        """Says what there is to say, and waits until all is answered, for so many seconds at most; never raises."""
        deadline = self.clock() + seconds
        self.send()
        try:
            while (exchange := self.exchange) is not None and exchange.waiting and self.clock() < deadline:
                self.pump(deadline - self.clock())
        except (BooksTaken, BooksLost, BooksRefused):
            # Nothing of ours is left at the KV manager.
            return

    def close(self) -> None:
        """Says the last words, gives up the pool and ends the stream, all within a bounded time; never raises."""
        self._stopped.set()
        self.settle(self.limits.close)
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        if attempt.exchange is not None:
            request = pb.ClosePoolRequest(pool_id=self._opening.pool_id, epoch=self._epoch)
            attempt.link.close_pool(request, self.limits.close)
        attempt.link.close()

    def wait(self, seconds: float) -> None:
        """Sleeps, unless the session is closed meanwhile."""
        self._stopped.wait(seconds)

    def status(self) -> SessionStatus:
        """How the session does. Any thread may ask."""
        attempt = self._attempt
        exchange = attempt.exchange if attempt else None
        waits = SessionState.RESTORING if attempt and attempt.greeted else SessionState.AWAY
        return SessionStatus(
            state=SessionState.UP if exchange else waits,
            away_seconds=0.0 if exchange else self.clock() - self._away_since,
            lease_blocks=len(self.mirror.lease),
            taken_blocks=self.mirror.taken_total,
            restores=self._restores,
            resends=self._resends + (exchange.resends if exchange else 0),
        )

    def beat(self) -> None:
        """Says that this runner lives, when nothing was said for a while. Any thread may call it."""
        exchange = self.exchange
        if exchange is not None:
            exchange.beat(self.clock(), self.limits.beat)

    def _beat_on(self) -> None:
        while not self._stopped.wait(self.limits.beat / 2):
            self.beat()

    def _advance(self, seconds: float) -> None:
        now = self.clock()
        attempt = self._attempt
        if attempt is None:
            if now >= self._retry_at:
                self._attempt = _Attempt(self._dial(), now)
            return
        if not attempt.greeted and attempt.link.connected:
            self._greet(attempt, now)
        while (response := attempt.link.receive(seconds)) is not None:
            seconds = 0.0
            self._take(attempt, response)
        self._check_times(attempt, self.clock())

    def _check_times(self, attempt: _Attempt, now: float) -> None:
        if attempt.exchange is not None:
            if attempt.exchange.oldest(now) > self.limits.answer:
                raise LinkBroken(f"the KV manager has not answered for {self.limits.answer:g} s")
        elif now - attempt.since > (self.limits.opening if attempt.greeted else self.limits.connect):
            raise LinkBroken("the KV manager does not answer")

    def _greet(self, attempt: _Attempt, now: float) -> None:
        """Opens the pool, with a report when anything is held."""
        attempt.greeted, attempt.since = True, now
        self._opening.restores = self.mirror.holds_something
        self._opening.lease_blocks = self.mirror.spares.told = self.mirror.spares.wanted
        attempt.link.send(pb.SessionRequest(open=self._opening))
        if self._opening.restores:
            for part in holdings(self.mirror):
                attempt.link.send(pb.SessionRequest(holdings=part))
        self.mirror.report()

    def _take(self, attempt: _Attempt, response: pb.SessionResponse) -> None:
        match response.WhichOneof("message"):
            case "opened" if attempt.exchange is None:
                self._epoch = response.opened.epoch
                self._restores += self._opening.restores
                self.mirror.add_lease(response.opened.lease_block_ids)
                attempt.exchange = Exchange(self._epoch, attempt.link.send)
            case "answer" if attempt.exchange is not None:
                for answer, seconds in attempt.exchange.take(response.answer, attempt.link.received_at):
                    self.mirror.apply(answer)
                    self.punctuality.note_answer(seconds)
                    self._watch.on_round_trip(seconds)
            case "gap" if attempt.exchange is not None:
                attempt.exchange.resend(response.gap.expected_number)

    def _meaning(self, broken: LinkBroken, was_up: bool) -> Exception | None:
        """What the KV manager's word says to the engine; None when the next attempt may do better."""
        if broken.reason == "STALE_EPOCH":
            return BooksTaken(str(broken))
        if was_up or broken.code == "UNAVAILABLE":
            return None
        if not self.mirror.holds_something:
            return BooksRefused(str(broken), broken.reason)
        if broken.reason in _LASTING:
            return None
        self.mirror.forget()
        return BooksLost(str(broken))
