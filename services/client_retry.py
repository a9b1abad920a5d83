"""When a client may send a request again: only while nothing of it was started, and only a few times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from services.errors import RpcErrorView

_NOT_TAKEN = frozenset({"NOT_READY", "STOPPING"})
"""Reasons of a model runner that says itself that it has not taken the request."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most `attempts` more, the first after `first_seconds`, each further one after twice as long."""

    attempts: int = 4
    first_seconds: float = 0.1

    def pauses(self) -> Iterator[float]:
        """The seconds before each further attempt."""
        for attempt in range(self.attempts):
            yield self.first_seconds * 2**attempt


NO_RETRIES = RetryPolicy(attempts=0)


def may_retry(failure: RpcErrorView, begun: bool) -> bool:
    """Whether a request that failed so may be sent again. begun: a part of the answer had come."""
    return failure.code == "UNAVAILABLE" and not begun and (not failure.reason or failure.reason in _NOT_TAKEN)


def must_ask(failure: RpcErrorView, request_id: str) -> bool:
    """Whether the server must first say that it does not know the request: it may have got it under this very id.

    A request without an id of the client's gets another one each time, and ends with its stream.
    """
    return bool(request_id) and failure.reason not in _NOT_TAKEN


class Deadline:
    """What is left of the seconds for a whole call; None is no limit."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def allows(self, pause: float) -> bool:
        """Whether there is time for a pause and more."""
        return self.left is None or pause < self.left
