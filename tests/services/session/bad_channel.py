"""A KV manager behind a channel that loses, doubles, delays, reorders and cuts, on a clock that the test owns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import KvError
from kvmanager.manager import KvManager
from services.errors import kv_failure
from services.session.link import LinkBroken
from services.session_core import SessionCore, SessionCounts


class FakeClock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Faults:
    """Chances for each message, each way; delay in seconds at most."""

    lost: float = 0.0
    doubled: float = 0.0
    delayed: float = 0.0
    delay: float = 0.0
    cut: float = 0.0


NO_FAULTS = Faults()


@dataclass
class FakeServer:
    """The KV manager's process: it may be killed, stopped, and started anew. Thread-unsafe, like the clock."""

    clock: FakeClock
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = NO_FAULTS
    latency: float = 0.001
    running: bool = True
    stopped: bool = False
    awake_since: float = 0.0
    boots: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    links: list[FakeLink] = field(default_factory=list)
    counts: SessionCounts = field(default_factory=SessionCounts)
    cuts: int = 0
    truncations: int = 0
    """Rewinds that runners have sent."""
    refusals: list[str] = field(default_factory=list)
    """Why the KV manager ended streams of its own accord."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process, with empty books and epochs that were never used."""
        self.running, self.stopped = True, False
        boot = next(self.boots)
        self.manager = KvManager(f"boot {boot}", epoch_base=1000 * boot)

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        self.stopped, self.awake_since = False, self.clock.now

    def kill(self) -> None:
        """kill -9: every stream breaks, and the books are gone."""
        self.running = False
        for link in self.links[:]:
            link.cut("killed")

    def dial(self) -> FakeLink:
        """One attempt to connect."""
        link = FakeLink(self)
        self.links.append(link)
        return link

    @contextmanager
    def healed(self) -> Iterator[None]:
        """A time without faults."""
        faults, self.faults = self.faults, NO_FAULTS
        try:
            yield
        finally:
            self.faults = faults


class FakeLink:
    """A services.session.link.Link to a FakeServer; messages arrive when the clock has reached their time."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._core = SessionCore(server.manager, server.counts, 10.0)
        self._to_server: list[tuple[float, int, pb.SessionRequest]] = []
        self._to_client: list[tuple[float, int, pb.SessionResponse]] = []
        self._order = itertools.count()
        self._broken: LinkBroken | None = None
        self.received_at = 0.0

    @property
    def connected(self) -> bool:
        return self._server.running and not self._server.stopped

    def send(self, request: pb.SessionRequest) -> None:
        copy = pb.SessionRequest.FromString(request.SerializeToString())
        self._server.truncations += sum(order.HasField("truncate") for order in request.step.orders)
        # What opens a session goes over as it does on a stream: whole and in order, or not at all.
        faults = self._server.faults if request.HasField("step") else NO_FAULTS
        self._put(self._to_server, copy, faults, self._server.clock.now)

    def receive(self, seconds: float) -> pb.SessionResponse | None:
        clock = self._server.clock
        deadline = clock.now + (max(seconds, 1e-6) if seconds > 0 else 0.0)
        while True:
            self._carry()
            if self._broken is not None:
                raise self._broken
            if self._to_client and self._to_client[0][0] <= clock.now:
                self.received_at, _, response = self._to_client.pop(0)
                return response
            arrivals = [queue[0][0] for queue in (self._to_server, self._to_client) if queue]
            if clock.now >= deadline:
                return None
            clock.now = min([deadline, *(moment for moment in arrivals if moment > clock.now)])

    def close_pool(self, request: pb.ClosePoolRequest, seconds: float) -> None:
        if self.connected:
            self._server.manager.close_pool(request.pool_id, request.epoch)

    def close(self) -> None:
        self.cut("closed")

    def cut(self, why: str) -> None:
        """The stream breaks at both ends."""
        if self in self._server.links:
            self._server.links.remove(self)
            self._core.end()
        self._broken = self._broken or LinkBroken(why)

    def _put(self, queue: list, message: object, faults: Faults, now: float) -> None:
        rng = self._server.rng
        if rng.random() < faults.cut:
            self._server.cuts += 1
            self.cut("cut")
            return
        if rng.random() < faults.lost:
            return
        for _ in range(2 if rng.random() < faults.doubled else 1):
            late = rng.random() * faults.delay if rng.random() < faults.delayed else 0.0
            queue.append((now + self._server.latency + late, next(self._order), message))
        queue.sort(key=lambda item: item[:2])

    def _carry(self) -> None:
        """Lets the server take what has arrived."""
        server = self._server
        if self._broken is not None or not server.running or server.stopped:
            return
        while self._to_server and self._to_server[0][0] <= server.clock.now and self._broken is None:
            moment, _, request = self._to_server.pop(0)
            # A server that was stopped answers when it goes on.
            moment = max(moment, server.awake_since)
            answers: list[pb.SessionResponse] = []
            try:
                self._core.receive(request, answers.append)
            except KvError as error:
                failure = kv_failure(error)
                assert failure is not None
                self.cut(str(error))
                self._broken = LinkBroken(failure.sentence, failure.code.name, failure.reason)
                self._server.refusals.append(f"{failure.reason}: {failure.sentence}")
                return
            for answer in answers:
                copy = pb.SessionResponse.FromString(answer.SerializeToString())
                faults = NO_FAULTS if answer.HasField("opened") else server.faults
                self._put(self._to_client, copy, faults, moment)
