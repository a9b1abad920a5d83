"""An engine, its session and its KV manager in one thread, on a clock that goes on by what steps and messages take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from octavo.kv.v1 import kv_manager_pb2 as pb

from bench.sleeping import SleepingExecutor
from kvmanager.manager import KvManager
from kvmanager.runner_pool import RunnerPool
from model_runner.engine import Engine
from model_runner.sequence import Sequence
from model_runner.steps import Launched, StepOrder, StepResult
from services.session_core import SessionCore, SessionCounts

IDLE_SECONDS = 0.001
"""What a turn of the engine without a step takes."""


class VirtualClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class VirtualManager:
    """A KV manager that answers each message after so many seconds."""

    def __init__(self, clock: VirtualClock, round_trip: float) -> None:
        self.clock = clock
        self.round_trip = round_trip
        self.manager = KvManager("virtual")
        self.counts = SessionCounts()
        self._links: list[VirtualLink] = []

    def dial(self) -> VirtualLink:
        """One attempt to connect, which succeeds."""
        self._links.append(VirtualLink(self))
        return self._links[-1]

    @property
    def pool(self) -> RunnerPool:
        return self.manager.pool("default")

    def work(self) -> None:
        """Carries out what has come by now."""
        for link in self._links:
            link.carry()


class VirtualLink:
    """A services.session.link.Link: a message is carried out half a round trip after it was sent."""

    def __init__(self, server: VirtualManager) -> None:
        self.connected = True
        self.received_at = 0.0
        self._server = server
        self._core = SessionCore(server.manager, server.counts, silence_seconds=1e9)
        self._asked: deque[tuple[float, pb.SessionRequest]] = deque()
        self._answered: deque[tuple[float, pb.SessionResponse]] = deque()

    def send(self, request: pb.SessionRequest) -> None:
        self._asked.append((self._server.clock.now + self._server.round_trip / 2, request))

    def receive(self, seconds: float) -> pb.SessionResponse | None:
        clock = self._server.clock
        self.carry(clock.now + seconds)
        if not self._answered or self._answered[0][0] > clock.now + seconds:
            clock.now += seconds
            return None
        self.received_at, answer = self._answered.popleft()
        clock.now = max(clock.now, self.received_at)
        return answer

    def close_pool(self, request: pb.ClosePoolRequest, seconds: float) -> None:
        self._server.manager.close_pool(request.pool_id, request.epoch)

    def close(self) -> None:
        self._core.end()

    def carry(self, until: float | None = None) -> None:
        """Lets the KV manager carry out what has come until now, or until another time."""
        until = self._server.clock.now if until is None else until
        while self._asked and self._asked[0][0] <= until:
            moment, request = self._asked.popleft()
            for answer in self._core.receive(request):
                self._answered.append((moment + self._server.round_trip / 2, answer))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds that a step takes: `fixed`, and `row` for each token that it computes."""

    fixed: float
    row: float

    def of(self, order: StepOrder) -> float:
        return self.fixed + self.row * sum(len(entry.token_ids) for entry in order.entries)


class VirtualSteps:
    """Steps without a model, whose time is that of a StepTime; `watch` gets each at its end with its seconds."""

    def __init__(
        self, time: StepTime, server: VirtualManager, model: SleepingExecutor, watch: Callable[[StepOrder, float], None]
    ) -> None:
        self.time, self.server, self.model, self.watch = time, server, model, watch

    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        return _VirtualStep(self, order)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _VirtualStep:
    steps: VirtualSteps
    order: StepOrder

    def wait(self) -> StepResult:
        steps, seconds = self.steps, self.steps.time.of(self.order)
        steps.server.clock.now += seconds
        steps.server.work()
        steps.watch(self.order, seconds)
        return StepResult(steps.model.execute(self.order.entries, self.order.copies), None)


class VirtualEngine(Engine):
    """An engine whose turns are taken by its owner, and which waits without sleeping."""

    clock: VirtualClock

    def turn(self) -> None:
        """One turn of its loop."""
        self._turn()

    @property
    def running(self) -> list[Sequence]:
        """The sequences that hold blocks."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Sequences in line."""
        return len(self._scheduler.waiting)

    def _wait(self) -> None:
        self.clock.now += IDLE_SECONDS
        self._books.flush()
