"""The orders of one step, carried out in the books of one runner, whose sequences go by handles."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import BrokenBooks, InvalidArgument, KvError, PoolShort
from kvmanager.news import News
from kvmanager.runner_pool import RunnerPool
from kvmanager.sequence import Sequence
from kvmanager.types import Append, Grant
from services import kv_wire as wire
from services import session_wire
from services.columns import from_column, to_column
from services.session_wire import ProgressColumns


@dataclass(slots=True)
class _Outcome:
    """What the answer to a step will say."""

    grants: list[tuple[int, Grant]] = field(default_factory=list)
    admitted: list[pb.Admitted] = field(default_factory=list)
    refusals: list[pb.Refusal] = field(default_factory=list)
    short: bool = False
    """Whether blocks were asked for in vain: then the lease must not take what there is."""


@dataclass(frozen=True, slots=True)
class _Order:
    """An order whose columns are read. ids: the prompt of an admission, or the handles of a fork's children."""

    message: pb.SessionOrder
    kind: str
    progress: ProgressColumns | None
    ids: array[int]


class SessionOrders:
    """The live sequences of one session by handle. An order is carried out whole or not at all."""

    def __init__(self, epoch: int, lease_blocks: int) -> None:
        self._epoch = epoch
        self._lease_blocks = lease_blocks
        self._sequences: dict[int, Sequence] = {}
        self._handles: dict[str, int] = {}

    def begin(self, handle: int, sequence: Sequence) -> None:
        """Gives a new sequence its handle. Raises InvalidArgument when another one has it."""
        self._check_new(handle)
        self._sequences[handle] = sequence
        self._handles[sequence.sequence_id] = handle

    def fill_lease(self, pool: RunnerPool) -> bytes:
        """The column of blocks that are new in the lease."""
        return to_column(pool.fill_lease(self._lease_blocks))

    def carry_out(self, pool: RunnerPool, step: pb.SessionStep) -> pb.SessionAnswer:
        """Carries out a step and answers it, but for what the answer does not depend on: the pool has to settle() that
        before anything else.

        Raises InvalidArgument for what the runner can't mean; the orders before it are carried out then, unless it is
        a column that can't be read.
        """
        if step.HasField("lease_blocks"):
            self._lease_blocks = checked_lease(step.lease_blocks, "lease_blocks")
        orders = [_parsed(order) for order in step.orders]
        _check_admissions_last(orders)
        pool.give_back(list(from_column(step.returned_block_ids, "returned_block_ids")))
        outcome = _Outcome()
        for order in orders:
            pool.settle()
            self._carry_out(pool, order, outcome)
        answer = pb.SessionAnswer(number=step.number, admitted=outcome.admitted, refusals=outcome.refusals)
        if outcome.grants:
            answer.grants.CopyFrom(session_wire.grants_to_wire(outcome.grants))
        if not outcome.short:
            answer.lease_block_ids = self.fill_lease(pool)
        answer.forgotten_block_ids = to_column(pool.take_forgotten())
        return answer

    def _carry_out(self, pool: RunnerPool, order: _Order, outcome: _Outcome) -> None:
        if order.kind == "end":
            self._end(pool, order)
        elif order.progress is not None:
            self._answer(pool, self._news(order.progress), outcome)
        elif order.kind == "admit":
            self._admit(pool, order.message.admit, order.ids, outcome)
        elif order.kind == "fork":
            self._fork(pool, order.message.fork, order.ids)
        else:
            truncate = order.message.truncate
            sequence = self._sequence(truncate.handle)
            with _certain():
                pool.truncate(sequence.sequence_id, truncate.num_tokens, caller=self._epoch)

    def _answer(self, pool: RunnerPool, news: News, outcome: _Outcome) -> None:
        grants, refused = pool.answer(news)
        handles = self._handles
        outcome.grants += [(handles[grant.sequence_id], grant) for grant in grants]
        for sequence, error in refused:
            outcome.refusals.append(session_wire.refusal_to_wire(handles[sequence.sequence_id], error))
            outcome.short = outcome.short or error.reason == PoolShort.reason

    def _end(self, pool: RunnerPool, order: _Order) -> None:
        columns = order.progress
        assert columns is not None, "an end has columns"
        known = {handle: self._sequences[handle] for handle in columns.handles if handle in self._sequences}
        pool.progress(self._news(columns, skip_unknown=True), ending=True)
        ended = [self._sequences.pop(handle).sequence_id for handle in known]
        pool.free(list(map(Append, ended)), preempted=order.message.end.preempted, caller=self._epoch)
        for sequence_id in ended:
            del self._handles[sequence_id]

    def _admit(self, pool: RunnerPool, order: pb.AdmitOrder, token_ids: array[int], outcome: _Outcome) -> None:
        self._check_new(order.handle)
        try:
            allocation = pool.allocate(
                order.sequence_id,
                token_ids,
                scope=wire.scope_from_wire(order.scope),
                retention=wire.retention_from_wire(order.retention),
                headroom_blocks=order.headroom_blocks,
                skip_cache_read=order.skip_cache_read,
                skip_cache_write=order.skip_cache_write,
                resumed=order.resumed,
                promised_tokens=order.promised_tokens,
                caller=self._epoch,
            )
        except BrokenBooks:
            raise
        except KvError as error:
            outcome.refusals.append(session_wire.refusal_to_wire(order.handle, error))
            outcome.short = True
            return
        self.begin(order.handle, pool.sequence(order.sequence_id))
        outcome.admitted.append(session_wire.admitted_to_wire(order.handle, allocation))

    def _fork(self, pool: RunnerPool, order: pb.ForkOrder, handles: array[int]) -> None:
        parent = self._sequence(order.parent_handle)
        if len(handles) != len(order.child_ids) or len(set(handles)) < len(handles):
            raise InvalidArgument(
                f"a fork names {len(order.child_ids)} children and {len(handles)} handles; each needs one of its own",
                children=len(order.child_ids),
                field="child_handles",
            )
        for handle in handles:
            self._check_new(handle)
        with _certain():
            pool.fork(parent.sequence_id, list(order.child_ids), caller=self._epoch)
        for handle, child_id in zip(handles, order.child_ids, strict=True):
            self.begin(handle, pool.sequence(child_id))

    def _news(self, columns: ProgressColumns, *, skip_unknown: bool = False) -> News:
        """What the columns tell. Raises InvalidArgument for a handle that is unknown, unless those don't count."""
        if skip_unknown and not self._sequences.keys() >= set(columns.handles):
            columns = session_wire.only(columns, [handle in self._sequences for handle in columns.handles])
        try:
            sequences = list(map(self._sequences.__getitem__, columns.handles))
        except KeyError as error:
            raise _unknown(error.args[0]) from None
        return News(
            sequences,
            columns.token_counts,
            columns.token_ids,
            columns.computed,
            columns.asks,
            columns.entries,
            columns.taken_counts,
            columns.taken,
        )

    def _sequence(self, handle: int) -> Sequence:
        sequence = self._sequences.get(handle)
        if sequence is None:
            raise _unknown(handle)
        return sequence

    def _check_new(self, handle: int) -> None:
        if handle in self._sequences:
            taken_by = self._sequences[handle].sequence_id
            raise InvalidArgument(f"handle {handle} is that of live sequence {taken_by!r} already", handle=handle)


def checked_lease(blocks: int, field_name: str) -> int:
    """The blocks that a runner wants to have at hand. Raises InvalidArgument for less than none."""
    if blocks < 0:
        raise InvalidArgument(f"lease_blocks is {blocks}; use 0 or more", lease_blocks=blocks, field=field_name)
    return blocks


def _unknown(handle: int) -> InvalidArgument:
    return InvalidArgument(f"no live sequence of this session has handle {handle}", handle=handle)


def _parsed(order: pb.SessionOrder) -> _Order:
    kind = order.WhichOneof("order")
    ids = array("I")
    progress: ProgressColumns | None = None
    if kind == "progress":
        progress = session_wire.progress_from_wire(order.progress)
    elif kind == "end":
        progress = session_wire.progress_from_wire(order.end.progress)
        if any(progress.asks):
            raise InvalidArgument("a sequence that ends asks for nothing", field="asks")
    elif kind == "admit":
        ids = from_column(order.admit.token_ids, "token_ids")
    elif kind == "fork":
        ids = from_column(order.fork.child_handles, "child_handles")
    elif kind is None:
        raise InvalidArgument("an order says nothing, or what this KV manager does not know", field="orders")
    return _Order(order, kind, progress, ids)


def _check_admissions_last(orders: Iterable[_Order]) -> None:
    seen = False
    for order in orders:
        if seen and order.kind != "admit":
            raise InvalidArgument(f"a {order.kind} follows an admit; admits come last in a step", field="orders")
        seen = order.kind == "admit"


@contextmanager
def _certain() -> Iterator[None]:
    """Around what a runner has done already: a refusal means that it and the books don't agree (InvalidArgument)."""
    try:
        yield
    except (InvalidArgument, BrokenBooks):
        raise
    except KvError as error:
        raise InvalidArgument(str(error), reason=error.reason) from error
