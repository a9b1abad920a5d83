"""Exactly once: numbers the step messages of one session, keeps them until they are answered, and sends them again.

Two threads send: the engine's, and the one that says that the runner lives while the engine's has nothing to say.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.kv.v1 import kv_manager_pb2 as pb

from services.session.mirror import Mirror

Send = Callable[[pb.SessionRequest], None]


class AnswersLost(Exception):
    """An answer that is needed will not come."""


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A message that was sent, and when, in seconds of the sender's clock."""

    request: pb.SessionRequest
    sent_at: float

    @property
    def number(self) -> int:
        return self.request.step.number


class Exchange:
    """The step messages of one epoch. Thread-safe, but for take(), which one thread calls."""

    def __init__(self, epoch: int, send: Send) -> None:
        self._epoch = epoch
        self._send = send
        self._lock = threading.Lock()
        self._number = 0
        self._unanswered: deque[Unanswered] = deque()
        self._early: dict[int, pb.SessionAnswer] = {}
        self._last_sent = 0.0
        self.resends = 0

    def step(self, mirror: Mirror, now: float) -> int:
        """Sends what the mirror has to say, and returns the message's number."""
        with self._lock:
            number = self._number + 1
            outgoing = mirror.take_orders(number)
            step = pb.SessionStep(
                orders=outgoing.orders,
                returned_block_ids=outgoing.returned_block_ids,
                lease_blocks=outgoing.lease_blocks,
            )
            self._post(step, now)
            return number

    def beat(self, now: float, seconds: float) -> None:
        """Sends an empty message when nothing was sent for so many seconds."""
        with self._lock:
            if now - self._last_sent >= seconds:
                self._post(pb.SessionStep(), now)

    def take(self, answer: pb.SessionAnswer, now: float) -> list[tuple[pb.SessionAnswer, float]]:
        """The answers that this one makes complete, in order, each with the seconds that it took; `now`: when it came.

        One that comes twice, or to a message that was never sent, is dropped.
        """
        with self._lock:
            if self._unanswered and self._unanswered[0].number <= answer.number <= self._number:
                self._early[answer.number] = answer
            complete: list[tuple[pb.SessionAnswer, float]] = []
            while self._unanswered and self._unanswered[0].number in self._early:
                message = self._unanswered.popleft()
                complete.append((self._early.pop(message.number), now - message.sent_at))
            return complete

    def resend(self, expected_number: int) -> None:
        """Sends all messages from a number on again. Raises AnswersLost when the first of them is gone."""
        with self._lock:
            again = [each for each in self._unanswered if each.number >= expected_number]
            if expected_number <= self._number and (not again or again[0].number != expected_number):
                raise AnswersLost(f"the KV manager asks for message {expected_number}, which it has answered")
            for each in again:
                self.resends += 1
                self._send(each.request)

    def oldest(self, now: float) -> float:
        """Seconds for which the oldest message has waited for its answer; 0 when none waits."""
        with self._lock:
            return now - self._unanswered[0].sent_at if self._unanswered else 0.0

    @property
    def waiting(self) -> int:
        """Messages without an answer."""
        return len(self._unanswered)

    def _post(self, step: pb.SessionStep, now: float) -> None:
        self._number += 1
        step.epoch, step.number = self._epoch, self._number
        request = pb.SessionRequest(step=step)
        self._unanswered.append(Unanswered(request, now))
        self._last_sent = now
        self._send(request)
