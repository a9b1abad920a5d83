"""How long the runner waits for its KV manager, and when it gives a session up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """All in seconds but max_unanswered.

    ask, admit: how long the engine's thread waits for room, and for an admission, while the session is up; nothing else
    makes it wait. answer: without one for so long, the session is given up. connect, opening: how long an attempt may
    take to reach somebody, and to be answered. retry: between two attempts. beat: between two signs of life, 0 for
    none. close: for the last words. max_unanswered: messages on their way; with as many, what is to be told is
    gathered.
    """

    ask: float = 0.05
    admit: float = 0.2
    answer: float = 3.0
    connect: float = 2.0
    opening: float = 5.0
    retry: float = 0.25
    beat: float = 1.0
    close: float = 1.0
    max_unanswered: int = 32
