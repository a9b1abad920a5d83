"""One Session without a wire: what a runner says goes in, the answers come out, and the books change in between."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, SessionTaken
from kvmanager.holdings import Holdings
from kvmanager.manager import KvManager
from kvmanager.runner_pool import RunnerPool
from services import kv_wire as wire
from services import session_wire
from services.columns import from_column
from services.session_orders import SessionOrders, checked_lease

KEPT_ANSWERS: Final = 8
"""More than a runner has steps without an answer."""

MAX_HOLDINGS_BYTES: Final = 1 << 30
"""Of the parts of a restore together."""

Say = Callable[[pb.SessionResponse], None]
"""Takes an answer away, to its runner."""


@dataclass(slots=True)
class SessionCounts:
    """What has happened in all sessions of a process; counts only grow."""

    opened: int = 0
    messages: int = 0
    steps: int = 0
    resent: int = 0
    """Steps that came again and were answered again."""
    dropped: int = 0
    """Steps older than the last one that was answered."""
    gaps: int = 0
    restores: int = 0


class _Restore:
    """The parts of a restore that have come."""

    def __init__(self) -> None:
        self._sequences: list[pb.HeldSequence] = []
        self._lease = array("I")
        self._cached: list[pb.CachedBlocks] = []
        self._bytes = 0

    def add(self, part: pb.Holdings) -> None:
        """Takes one part. Raises InvalidArgument when they are too many."""
        self._bytes += part.ByteSize()
        if self._bytes > MAX_HOLDINGS_BYTES:
            raise InvalidArgument(
                f"the holdings have more than {MAX_HOLDINGS_BYTES} bytes", maximum=MAX_HOLDINGS_BYTES, field="holdings"
            )
        self._sequences += part.sequences
        self._lease += from_column(part.lease_block_ids, "lease_block_ids")
        self._cached += part.cached

    def into(self, pool: RunnerPool, epoch: int, orders: SessionOrders) -> None:
        """Makes the books of the pool from all parts, and gives the sequences their handles."""
        handles = [held.handle for held in self._sequences]
        if len(set(handles)) < len(handles):
            raise InvalidArgument("the holdings give two sequences one handle", field="handle")
        sequences = list(map(session_wire.held_sequence_from_wire, self._sequences))
        cached = list(map(session_wire.held_cache_from_wire, self._cached))
        pool.restore(Holdings(sequences, self._lease, cached), caller=epoch)
        for held in self._sequences:
            orders.begin(held.handle, pool.sequence(held.sequence_id))


class SessionCore:
    """One session from its opening to its end.

    Whatever receive() raises ends it: the owner then calls end(). The books are whole at every moment, and know of a
    message when receive() returns: an answer goes out before all is written down that it does not depend on.
    """

    def __init__(self, manager: KvManager, counts: SessionCounts, silence_seconds: float) -> None:
        self._manager = manager
        self._counts = counts
        self._silence_seconds = silence_seconds
        self._restore: _Restore | None = None
        self._orders: SessionOrders | None = None
        self._answers: deque[pb.SessionResponse] = deque(maxlen=KEPT_ANSWERS)
        self._number = 0
        self.pool_id = ""
        self.epoch = 0
        """0 before the opening."""
        self.closed_sequences = 0
        """Sequences that the end of the session ended."""

    def receive(self, request: pb.SessionRequest, say: Say) -> None:
        """Takes the next message of the runner, and says what there is to answer: nothing, or one response.

        Raises InvalidArgument for what makes no sense, PoolDiffers, SessionTaken when another opening has followed,
        UnknownPool when the pool was closed.
        """
        self._counts.messages += 1
        kind = request.WhichOneof("message")
        if kind == "step" and self._restore is None and self._orders is not None:
            self._step(request.step, self._orders, say)
        elif kind == "holdings" and self._restore is not None and self._orders is not None:
            self._hold(request.holdings, self._restore, self._orders, say)
        elif kind == "open" and self._orders is None:
            self._open(request.open, say)
        else:
            raise InvalidArgument(
                "a session begins with open, then come holdings if it restores, then steps; "
                f"not {kind or 'nothing'} here",
                field="message",
            )

    @property
    def restores(self) -> bool:
        """Whether the runner's report is not complete yet."""
        return self._restore is not None

    @property
    def is_alive(self) -> bool:
        """Whether this session speaks for its pool."""
        return self._manager.speaks_for(self.pool_id, self.epoch)

    def check_alive(self) -> None:
        """Raises what has ended the session from elsewhere: SessionTaken, UnknownPool."""
        self._manager.session_pool(self.pool_id, self.epoch)

    def end(self) -> None:
        """Ends the runner's sequences, as far as no other opening has, and takes its lease back. Again: nothing."""
        if self.epoch:
            self.closed_sequences += self._manager.end_session(self.pool_id, self.epoch)

    def _open(self, request: pb.SessionOpen, say: Say) -> None:
        lease_blocks = checked_lease(request.lease_blocks, "open.lease_blocks")
        pool_id, spec = wire.pool_id_of(request.pool_id), wire.spec_from_wire(request.spec)
        opening = self._manager.open_session(pool_id, spec, request.runner_id, restores=request.restores)
        self.pool_id, self.epoch = pool_id, opening.epoch
        self._counts.opened += 1
        self._orders = SessionOrders(opening.epoch, lease_blocks)
        if request.restores:
            self._restore = _Restore()
        else:
            self._opened(opening.pool, self._orders, say)

    def _hold(self, part: pb.Holdings, restore: _Restore, orders: SessionOrders, say: Say) -> None:
        pool = self._manager.session_pool(self.pool_id, self.epoch)
        restore.add(part)
        if not part.last:
            return
        restore.into(pool, self.epoch, orders)
        self._restore = None
        self._counts.restores += 1
        self._opened(pool, orders, say)

    def _opened(self, pool: RunnerPool, orders: SessionOrders, say: Say) -> None:
        opened = pb.SessionOpened(
            boot_id=self._manager.boot_id,
            epoch=self.epoch,
            lease_block_ids=orders.fill_lease(pool),
            silence_seconds=self._silence_seconds,
        )
        say(pb.SessionResponse(opened=opened))

    def _step(self, step: pb.SessionStep, orders: SessionOrders, say: Say) -> None:
        pool = self._manager.session_pool(self.pool_id, self.epoch)
        self._check_epoch(step.epoch)
        if step.number <= self._number:
            self._say_again(step.number, say)
        elif step.number > self._number + 1:
            self._counts.gaps += 1
            say(pb.SessionResponse(gap=pb.SessionGap(expected_number=self._number + 1)))
        else:
            self._counts.steps += 1
            try:
                self._carry_out(pool, step, orders, say)
            finally:
                pool.settle()

    def _carry_out(self, pool: RunnerPool, step: pb.SessionStep, orders: SessionOrders, say: Say) -> None:
        answer = pb.SessionResponse(answer=orders.carry_out(pool, step))
        self._number = step.number
        self._answers.append(answer)
        say(answer)

    def _say_again(self, number: int, say: Say) -> None:
        """The answer to a step that was carried out before; nothing when that is too long ago."""
        age = self._number - number
        if age >= len(self._answers):
            self._counts.dropped += 1
        else:
            self._counts.resent += 1
            say(self._answers[-1 - age])

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise SessionTaken(
                f"the step speaks for epoch {epoch} of pool {self.pool_id!r}, and this session is epoch {self.epoch}",
                pool_id=self.pool_id,
                epoch=self.epoch,
                caller_epoch=epoch,
            )
