"""The engine's front door: what callers of any thread submit and cancel, until the engine's own takes it in."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from model_runner.engine_types import DuplicateRequest, EngineStopped, QueueFull
from model_runner.line_speed import LineSpeed
from model_runner.request import RequestView
from model_runner.sequence import LiveRequest


@dataclass(frozen=True, slots=True)
class News:
    """What has come since the last time: new requests, live ones to be aborted, and whether the engine is to stop.

    throttled: live ones that are to pause, or, if false, to go on.
    """

    arrived: list[LiveRequest]
    aborted: list[LiveRequest]
    throttled: list[tuple[LiveRequest, bool]]
    stopping: bool


class Intake:
    """The live requests by id. Thread-safe."""

    def __init__(self, max_queued_requests: int, max_queued_tokens: int) -> None:
        self._max_queued = max_queued_requests
        self._max_queued_tokens = max_queued_tokens
        self._speed = LineSpeed()
        self._lock = threading.Condition()
        self._live: dict[str, LiveRequest] = {}
        self._arrived: list[LiveRequest] = []
        self._aborted: list[LiveRequest] = []
        self._throttled: dict[LiveRequest, bool] = {}
        self._stopping = False

    def submit(self, live: LiveRequest) -> None:
        """Takes in a request. Raises DuplicateRequest, QueueFull, EngineStopped."""
        request_id = live.request.request_id
        with self._lock:
            if self._stopping:
                raise EngineStopped("the server is shutting down; send the request to another one")
            if request_id in self._live:
                raise DuplicateRequest(f"request {request_id!r} is live already; take another id")
            self._check_room(0, len(live.request.prompt_token_ids))
            self._live[request_id] = live
            self._arrived.append(live)
            self._lock.notify()

    def check_room(self, ahead: int) -> None:
        """Raises QueueFull when there is no room for one more behind `ahead` that are not submitted yet."""
        with self._lock:
            self._check_room(ahead, 0)

    def _check_room(self, ahead: int, tokens: int) -> None:
        waiting = [len(other.request.prompt_token_ids) for other in self._live.values() if other.admitted_at is None]
        if len(waiting) + ahead >= self._max_queued:
            self._refuse(f"{len(waiting) + ahead} requests wait already, as many as may")
        if waiting and sum(waiting) + tokens > self._max_queued_tokens:
            self._refuse(
                f"{len(waiting)} requests with {sum(waiting)} prompt tokens wait already, and with {tokens} more they "
                f"would be above {self._max_queued_tokens}"
            )

    def _refuse(self, why: str) -> NoReturn:
        seconds = self._speed.seconds_per_request(time.monotonic())
        raise QueueFull(f"{why}; retry in {seconds:.1f} seconds", seconds)

    def cancel(self, live: LiveRequest) -> None:
        """Ends this request before the next step, and never a later one of the same id."""
        with self._lock:
            self._aborted.append(live)
            self._lock.notify()

    def abort(self, request_ids: Sequence[str]) -> tuple[int, int]:
        """Ends requests before the next step. Returns how many were live, and how many unknown."""
        with self._lock:
            asked = dict.fromkeys(request_ids)
            known = [self._live[request_id] for request_id in asked if request_id in self._live]
            self._aborted.extend(known)
            self._lock.notify()
        return len(known), len(asked) - len(known)

    def throttle(self, live: LiveRequest, paused: bool) -> None:
        """Pauses a request before the next step, or lets it go on."""
        with self._lock:
            self._throttled[live] = paused
            self._lock.notify()

    def stop(self) -> None:
        """Lets nobody in any more."""
        with self._lock:
            self._stopping = True
            self._lock.notify()

    def views(self) -> list[RequestView]:
        """The live requests, oldest first, as an operator sees them."""
        now = time.monotonic()
        with self._lock:
            return [live.view(now) for live in self._live.values()]

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        with self._lock:
            running = sum(1 for live in self._live.values() if live.is_running)
            return running, len(self._live) - running

    # For the engine's thread.

    @property
    def interrupts(self) -> bool:
        """Whether somebody who may be part of a step in flight is to be aborted, or to pause."""
        with self._lock:
            return bool(self._aborted or self._throttled)

    def take(self, *, flying: bool = False) -> News:
        """What has come since the last call. flying: with a step in flight, all but what interrupts."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            if flying:
                return News(arrived, [], [], self._stopping)
            aborted, self._aborted = self._aborted, []
            throttled, self._throttled = self._throttled, {}
            return News(
                arrived,
                [live for live in dict.fromkeys(aborted) if self.is_live(live)],
                [(live, paused) for live, paused in throttled.items() if self.is_live(live)],
                self._stopping,
            )

    def wait(self, seconds: float, *, for_news: bool = True) -> bool:
        """Sleeps until something comes; false when nothing does. for_news=False: only what comes from now on counts."""
        with self._lock:
            if self._stopping or (for_news and (self._arrived or self._aborted or self._throttled)):
                return True
            return self._lock.wait(seconds)

    def note_admissions(self, lives: Sequence[LiveRequest], now: float) -> None:
        """The requests are part of a step: those for which it is the first have left the queue."""
        for live in lives:
            if live.admitted_at is None:
                with self._lock:
                    live.admitted_at = now
                    self._speed.note(now)

    def is_live(self, live: LiveRequest) -> bool:
        """Whether this very request has not ended."""
        return self._live.get(live.request.request_id) is live

    def all(self) -> list[LiveRequest]:
        """The live requests, oldest first."""
        with self._lock:
            return list(self._live.values())

    def forget(self, request_id: str) -> LiveRequest:
        """The request has ended."""
        with self._lock:
            return self._live.pop(request_id)
