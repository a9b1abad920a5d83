"""The engine's books over the Session stream: served from the mirror, with the KV manager told and asked beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.types import IndexKind
from model_runner.books import (
    INVALID_ARGUMENT,
    POOL_SHORT,
    Admission,
    AllocationRequest,
    BlockGrant,
    BooksLost,
    BooksRefused,
    BooksUnreachable,
    CopyOrder,
    Growth,
    PoolFacts,
    SequenceUpdate,
)
from services.cache_options import DEFAULT_CACHE, CacheOptions
from services.kv_wire import spec_to_wire
from services.session.held import Held, Refused
from services.session.limits import SessionLimits
from services.session.link import Dial
from services.session.mirror import BrokenMirror, Mirror
from services.session.session import Session, SessionState, SessionStatus, SessionWatch, SilentWatch
from services.session.tap import Glance, SequenceTap

_POLL_SECONDS = 0.01
"""Between two looks at a connection that is being made."""
_NEVER_UP = SessionStatus(SessionState.AWAY, 0.0, lease_blocks=0, taken_blocks=0, restores=0, resends=0)


class SessionBooks:
    """A model_runner.books.KvBooks over one Session stream at a time. Used by one thread, but for status().

    Once open() has succeeded, a KV manager that is away is no error: what can be served from the mirror is served, and
    the rest is "not now". Verbs raise BooksTaken when another runner has the pool, BooksLost when nothing is held any
    more because the KV manager would not take this runner's report, BooksRefused for what is refused for good.
    """

    def __init__(
        self,
        dial: Dial,
        *,
        pool_id: str = "default",
        cache: CacheOptions = DEFAULT_CACHE,
        lease_blocks: int = 0,
        limits: SessionLimits | None = None,
        watch: SessionWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dial = dial
        self._pool_id = pool_id
        self._cache = cache
        self._lease_blocks = lease_blocks
        self._limits = limits or SessionLimits()
        self._watch = SilentWatch() if watch is None else watch
        self._clock = clock
        self._opened: Session | None = None
        self._tap: SequenceTap | None = None
        self._waited = 0.0
        self._patience = self._limits.admit

    def open(self, facts: PoolFacts) -> None:
        """Begins a session, and ends what was held; waits for a moment only.

        Raises BooksUnreachable until a session is there, and BooksRefused when the facts are refused.
        """
        if self._opened is None:
            self._opened = self._begin(facts)
        session = self._opened
        session.mirror.end([SequenceUpdate(name, (), 0) for name in session.mirror.live], preempted=True)
        session.pump()
        for _ in range(round(self._limits.admit / _POLL_SECONDS)):
            if session.exchange is not None:
                return
            if not session.is_connected:
                session.wait(_POLL_SECONDS)
            session.pump(_POLL_SECONDS if session.is_connected else 0.0)
        if session.exchange is None:
            raise BooksUnreachable(session.why)

    def allocate(self, request: AllocationRequest) -> Admission | None:
        """Blocks for all tokens of a new sequence; None while the pool is too full, or the KV manager away or late."""
        session = self._session
        session.pump()
        if session.mirror.is_hopeless(request):
            return None
        outcome = self._admit(session, request)
        if isinstance(outcome, Refused) and outcome.reason == POOL_SHORT and session.mirror.return_lease():
            outcome = self._admit(session, request)
        if outcome is None:
            return None
        if isinstance(outcome, Admission):
            return Admission(outcome.block_ids, outcome.cached_tokens, self._copies_due(session.mirror))
        if outcome.reason == POOL_SHORT:
            return None
        raise BooksRefused(outcome.sentence, outcome.reason)

    def append(self, updates: Sequence[SequenceUpdate]) -> Growth | None:
        """Commits all of the sequences and grows those that can be; None while the pool is too full for one of them."""
        session = self._session
        session.pump()
        with _faults():
            sequences = [session.mirror.tell(update) for update in updates]
        waiting = [held for held in sequences if not session.mirror.has_room(held)]
        if waiting:
            waiting = self._wait_for_room(session, waiting)
        refused = [held.refused for held in waiting if held.refused is not None]
        for each in refused:
            if each.reason != POOL_SHORT:
                raise BooksRefused(each.sentence, each.reason)
        return None if refused else self._growth(session.mirror, sequences, waiting)

    def extend(self, updates: Sequence[SequenceUpdate]) -> Growth:
        """Tells guesses of the sequences that have room for them, or get it from spare blocks; the others are stalled.

        While the KV manager is late or away, the spare blocks are for what can't be done without.
        """
        session = self._session
        session.pump()
        mirror = session.mirror
        grown: list[Held] = []
        stalled: set[str] = set()
        with _faults():
            for update in updates:
                if session.is_late or not mirror.can_spare(update):
                    stalled.add(update.sequence_id)
                    continue
                held = mirror.tell(update)
                mirror.has_room(held)
                grown.append(held)
        growth = self._growth(mirror, grown, [])
        return Growth(growth.grants, frozenset(stalled))

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Takes back what was told behind the first `num_tokens` tokens."""
        session = self._session
        session.pump()
        with _faults():
            session.mirror.truncate(sequence_id, num_tokens)

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        """Gives each child the parent's block table."""
        session = self._session
        session.pump()
        with _faults():
            try:
                session.mirror.fork(parent_id, child_ids)
            except BrokenMirror as error:
                # The answer that it waits for is void then, and the fork is in the next report.
                session.give_up(error)
                session.mirror.fork(parent_id, child_ids)

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        """Commits a last time and ends the sequences; unknown ones are ignored."""
        session = self._session
        session.pump()
        with _faults():
            session.mirror.end(updates, preempted=preempted)
        if not preempted:
            session.send()

    def flush(self) -> None:
        """Says what a step has to say, and asks for the room that the next ones will need."""
        session = self._session
        session.pump()
        session.punctuality.note_step(self._clock())
        session.mirror.step(asks=not session.is_late, prompt=session.punctuality.is_good)
        if session.mirror.is_time_to_speak:
            session.send()
        if self._waited:
            self._watch.on_wait(self._waited)
            self._waited = 0.0

    @property
    def away(self) -> str:
        """Why the KV manager can't be asked; empty while the session is up."""
        session = self._session
        return session.why if session.exchange is None else ""

    def close(self) -> None:
        """Says the last words, gives up the pool and ends the session, all within a bounded time; never raises."""
        session, self._opened = self._opened, None
        if session is not None:
            session.close()

    def status(self) -> SessionStatus:
        """How the session does. Any thread may ask."""
        session = self._opened
        return session.status() if session is not None else _NEVER_UP

    def listen(self, tap: SequenceTap) -> Glance | None:
        """From now on the tap is told the tokens of all sequences. Returns what is held, None before the pool is open.

        Any thread may call it, one at a time.
        """
        self._tap = tap
        session = self._opened
        if session is None:
            return None
        session.mirror.tap = tap
        return session.mirror.glance()

    @property
    def held_blocks(self) -> int:
        """Blocks that live sequences hold. Any thread may ask."""
        session = self._opened
        return session.mirror.held_blocks if session is not None else 0

    @property
    def _session(self) -> Session:
        if self._opened is None:
            raise BooksLost(f"Pool {self._pool_id!r} was never opened.")
        return self._opened

    def _begin(self, facts: PoolFacts) -> Session:
        spec = spec_to_wire(self._cache.spec(facts))
        caches = self._cache.index is not IndexKind.NONE
        mirror = Mirror(facts.num_blocks, facts.block_size, lease_blocks=self._lease_blocks, caches=caches)
        mirror.tap = self._tap
        return Session(
            self._dial,
            mirror,
            pb.SessionOpen(pool_id=self._pool_id, spec=spec),
            self._limits,
            self._watch,
            self._clock,
        )

    def _admit(self, session: Session, request: AllocationRequest) -> Admission | Refused | None:
        """Asks for a sequence and waits for a moment; None when there is no answer in time."""
        exchange = session.exchange
        if exchange is None or session.is_late:
            return None
        handle = session.mirror.admit(request)
        exchange.step(session.mirror, self._clock())
        started = now = self._clock()
        outcome = None
        while outcome is None and session.exchange is exchange and now - started < self._patience:
            session.pump(self._patience - (now - started))
            outcome = session.mirror.outcome(handle)
            now = self._clock()
        self._waited += now - started
        # One that always takes longer than the shortest wait must not be asked in vain for ever.
        self._patience = self._limits.admit if outcome else min(2 * self._patience, self._limits.answer)
        if outcome is None:
            session.mirror.withdraw(handle)
        return outcome

    def _wait_for_room(self, session: Session, waiting: list[Held]) -> list[Held]:
        """Asks for room and waits for a moment; returns who has none then, with or without a refusal."""
        late = session.is_late
        session.send()
        if late:
            return waiting
        started = now = self._clock()
        while session.exchange is not None and now - started < self._limits.ask:
            session.pump(self._limits.ask - (now - started))
            waiting = [held for held in waiting if held.refused or not session.mirror.has_room(held)]
            if all(held.refused for held in waiting):
                break
            session.send()
            now = self._clock()
        self._waited += self._clock() - started
        return waiting

    def _growth(self, mirror: Mirror, sequences: list[Held], stalled: list[Held]) -> Growth:
        grants: list[BlockGrant] = []
        for held in sequences:
            if held in stalled:
                continue
            first, blocks = mirror.show(held)
            if blocks or mirror.copies:
                # Nobody may write before the copies that are due, or what is to be copied might be gone.
                grants.append(BlockGrant(held.sequence_id, first, blocks, self._copies_due(mirror)))
        return Growth(grants, frozenset(held.sequence_id for held in stalled))

    def _copies_due(self, mirror: Mirror) -> tuple[CopyOrder, ...]:
        due, mirror.copies = tuple(mirror.copies), []
        return due


@contextmanager
def _faults() -> Iterator[None]:
    """Around what the engine tells: what can't be true is refused."""
    try:
        yield
    except ValueError as error:
        raise BooksRefused(str(error), INVALID_ARGUMENT) from error
