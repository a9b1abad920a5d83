"""Whether the runner of a pool is there, as an operator is told: in /metrics, and in health under a name of its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

HEALTH_PREFIX: Final = "session/"
"""Before a pool's id it makes the name under which health tells of its session."""

LAPSING_SHARE: Final = 0.4
"""Of the silence that ends a session. A runner that lives says a word every second."""


class Presence(Enum):
    """connected: a session is open. restoring: it is reporting what it holds. lapsing: its runner has been silent for
    so long that something is wrong. none: nobody speaks for the pool."""

    CONNECTED = "connected"
    RESTORING = "restoring"
    LAPSING = "lapsing"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class PoolSession:
    """A pool's session at one moment. silent_seconds: since its runner was heard; 0 without a session."""

    presence: Presence
    silent_seconds: float


NO_SESSION: Final = PoolSession(Presence.NONE, 0.0)
