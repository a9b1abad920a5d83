"""The faults: which, when and for how long, out of nothing but the seed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random


class FaultKind(Enum):
    """What can go wrong."""

    KILL_MANAGER = "kill -9 of the KV manager"
    STOP_MANAGER = "SIGSTOP of the KV manager"
    RESTART_MANAGER = "restart of the KV manager"
    DEAF_MANAGER = "a socket that accepts and never answers"
    LOSE = "messages are lost"
    DOUBLE = "messages come twice"
    DELAY = "messages are late"
    REORDER = "messages come out of order"
    CUT = "sessions are cut"
    KILL_RUNNER = "kill -9 of a runner"
    STOP_RUNNER = "SIGSTOP of a runner"


MESSAGE_FAULTS = frozenset({FaultKind.LOSE, FaultKind.DOUBLE, FaultKind.DELAY, FaultKind.REORDER, FaultKind.CUT})
"""What happens between each runner and its KV manager."""

_SECONDS = {
    FaultKind.KILL_MANAGER: (0.0, 2.0),
    FaultKind.STOP_MANAGER: (1.0, 10.0),
    FaultKind.RESTART_MANAGER: (0.0, 1.0),
    FaultKind.DEAF_MANAGER: (1.0, 7.0),
    FaultKind.KILL_RUNNER: (0.0, 1.0),
    FaultKind.STOP_RUNNER: (1.0, 6.0),
}
_MESSAGE_SECONDS = (2.0, 5.0)
_REST_SECONDS = (2.0, 4.0)
"""Between two faults, so that what is mended works for a while."""


@dataclass(frozen=True, slots=True)
class Fault:
    """at: seconds from the beginning of the load. seconds: how long it lasts. runner: which one, where it is one's own.

    share: of the messages, for faults of messages.
    """

    at: float
    kind: FaultKind
    seconds: float
    runner: int = 0
    share: float = 0.0

    def __str__(self) -> str:
        share = f", {self.share:.0%} of them" if self.share else ""
        whose = f" (runner {self.runner})" if self.kind in (FaultKind.KILL_RUNNER, FaultKind.STOP_RUNNER) else ""
        return f"{self.at:6.1f} s  {self.kind.value}{whose}, {self.seconds:.1f} s{share}"


def fault_schedule(seed: int, seconds: float, runners: int) -> tuple[Fault, ...]:
    """All faults of a run of so many seconds, one after the other. Every kind comes once before any comes again."""
    rng = Random(f"faults {seed}")
    faults: list[Fault] = []
    due: list[FaultKind] = []
    at = rng.uniform(1.0, 2.0)
    while True:
        if not due:
            due = list(FaultKind)
            rng.shuffle(due)
        fault = _fault(due.pop(), at, runners, rng)
        if fault.at + fault.seconds > seconds:
            return tuple(faults)
        faults.append(fault)
        at += fault.seconds + rng.uniform(*_REST_SECONDS)


def _fault(kind: FaultKind, at: float, runners: int, rng: Random) -> Fault:
    seconds = rng.uniform(*_SECONDS.get(kind, _MESSAGE_SECONDS))
    share = rng.uniform(0.02, 0.1) if kind is FaultKind.CUT else rng.uniform(0.1, 0.5)
    return Fault(at, kind, seconds, rng.randrange(runners), share if kind in MESSAGE_FAULTS else 0.0)
