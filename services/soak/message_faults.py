"""What happens to the messages of a session on their way: some are lost, doubled, late, out of order, or cut it.

Only steps and their answers are subject to it. What opens a session goes over whole and in order or not at all, as it
does on any stream.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from octavo.kv.v1 import kv_manager_pb2 as pb

from services.soak.faults import FaultKind

DELAY_SECONDS: Final = 1.0
"""A late message, and all behind it, come so much later at most."""
REORDER_SECONDS: Final = 0.2
"""How long a message waits for others to overtake it."""

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class MessageFault:
    """What happens to that share of the messages."""

    kind: FaultKind
    share: float


class MessageFaults:
    """The faults of one way. Set `fault` to begin, and None to end it."""

    def __init__(self, rng: Random) -> None:
        self.fault: MessageFault | None = None
        self.hits: Counter[FaultKind] = Counter()
        """Messages that something happened to, by what."""
        self._rng = rng

    async def carry(
        self,
        messages: AsyncIterator[Message],
        put: Callable[[Message], object],
        is_subject: Callable[[Message], bool],
    ) -> bool:
        """Moves messages on, as far as they are not lost, until no more come. Returns whether the session is cut."""
        async for message in messages:
            match self._happens() if is_subject(message) else None:
                case None:
                    put(message)
                case FaultKind.DOUBLE:
                    put(message)
                    put(message)
                case FaultKind.DELAY:
                    await asyncio.sleep(self._rng.uniform(0.0, DELAY_SECONDS))
                    put(message)
                case FaultKind.REORDER:
                    asyncio.get_running_loop().call_later(REORDER_SECONDS, put, message)
                case FaultKind.CUT:
                    return True
        return False

    def _happens(self) -> FaultKind | None:
        """What happens to the next message. A lost one is not moved on."""
        fault = self.fault
        if fault is None or self._rng.random() >= fault.share:
            return None
        self.hits[fault.kind] += 1
        return fault.kind


def is_step(message: bytes) -> bool:
    """Whether a SessionRequest is subject to faults."""
    return bool(pb.SessionRequest.FromString(message).HasField("step"))


def is_answer(message: bytes) -> bool:
    """Whether a SessionResponse is subject to faults."""
    return bool(pb.SessionResponse.FromString(message).HasField("answer"))
