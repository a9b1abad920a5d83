"""The orders of the next step message, in the order in which the engine gave them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.kv.v1 import kv_manager_pb2 as pb

from model_runner.books import AllocationRequest
from model_runner.request import Retention
from services.columns import to_column
from services.session.held import Held


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a step message carries besides its number."""

    orders: list[pb.SessionOrder]
    returned_block_ids: bytes
    lease_blocks: int
    askers: list[Held]


class OrderBook:
    """Collects orders until a message takes them. News of sequences are gathered as long as nothing comes between.

    What is asked for comes last, admissions last of all: so it finds the blocks that the message gives back, and what
    is not wanted any more is not asked for.
    """

    def __init__(self) -> None:
        self._orders: list[pb.SessionOrder] = []
        self._news: dict[int, Held] = {}
        self._askers: dict[int, Held] = {}
        self._admits: list[pb.SessionOrder] = []

    @property
    def empty(self) -> bool:
        return not (self._orders or self._news or self._askers or self._admits)

    @property
    def presses(self) -> bool:
        """Whether there is more than news of what was computed and told."""
        return bool(self._orders or self._askers or self._admits)

    def clear(self) -> None:
        """Forgets what is said otherwise."""
        self._orders, self._news, self._askers, self._admits = [], {}, {}, []

    def tell(self, held: Held) -> None:
        """The sequence has news: tokens, computed ones, or taken blocks."""
        self._news[held.handle] = held

    def ask(self, held: Held) -> None:
        """The sequence wants room."""
        self._askers[held.handle] = held

    def end(self, sequences: list[Held], preempted: bool) -> None:
        """They end, with their last news."""
        for held in sequences:
            self._news.pop(held.handle, None)
            self._askers.pop(held.handle, None)
        self._close_news()
        news = _progress(sequences)
        self._orders.append(pb.SessionOrder(end=pb.EndOrder(progress=news, preempted=preempted)))

    def fork(self, parent: Held, children: list[Held]) -> None:
        """Children of a sequence, as it is now."""
        self._close_news()
        order = pb.ForkOrder(
            parent_handle=parent.handle,
            child_ids=[child.sequence_id for child in children],
            child_handles=to_column(child.handle for child in children),
        )
        self._orders.append(pb.SessionOrder(fork=order))

    def truncate(self, held: Held, num_tokens: int) -> None:
        """Takes tokens back that were told before."""
        self._close_news()
        order = pb.TruncateOrder(handle=held.handle, num_tokens=num_tokens)
        self._orders.append(pb.SessionOrder(truncate=order))

    def admit(self, handle: int, request: AllocationRequest) -> None:
        """A sequence is to begin."""
        self._admits.append(pb.SessionOrder(admit=_admit_order(handle, request)))

    def take(self) -> tuple[list[pb.SessionOrder], list[Held]]:
        """The orders, and the sequences that ask for room in them."""
        askers = [held for held in self._askers.values() if held.wants]
        self._news |= self._askers
        self._close_news(asks=True)
        orders = self._orders + self._admits
        self.clear()
        return orders, askers

    def _close_news(self, *, asks: bool = False) -> None:
        if self._news:
            self._orders.append(pb.SessionOrder(progress=_progress(self._news.values(), asks=asks)))
            self._news = {}


def wire_retention(retention: Retention) -> pb.Retention:
    """How to keep what a sequence caches."""
    return pb.Retention(priority=retention.priority, pin_seconds=retention.pin_seconds)


def _admit_order(handle: int, request: AllocationRequest) -> pb.AdmitOrder:
    return pb.AdmitOrder(
        sequence_id=request.sequence_id,
        handle=handle,
        token_ids=to_column(request.token_ids),
        scope=pb.CacheScope(salt=request.cache_salt),
        headroom_blocks=request.headroom_blocks,
        skip_cache_read=request.skip_cache_read,
        skip_cache_write=request.skip_cache_write,
        resumed=request.resumed,
        retention=wire_retention(request.retention),
        promised_tokens=request.promised_tokens,
    )


def _progress(sequences: Iterable[Held], *, asks: bool = False) -> pb.Progress:
    """The news of sequences, which are sent from now on, and what they ask for if this is the place to ask."""
    handles, token_counts, computed, taken_counts, rooms, table_counts = [], [], [], [], [], []
    tokens: list[int] = []
    taken: list[int] = []
    for held in sequences:
        fresh = held.tokens[held.sent :]
        handles.append(held.handle)
        token_counts.append(len(fresh))
        tokens.extend(fresh)
        computed.append(held.computed)
        taken_counts.append(len(held.taken))
        taken.extend(held.taken)
        table_counts.append(held.taken_at if held.taken else len(held.blocks))
        rooms.append(max(1, held.wants - len(held.tokens) + 1) if asks and held.wants else 0)
        held.mark_sent()
        if asks:
            held.wants = 0
    return pb.Progress(
        handles=to_column(handles),
        token_counts=to_column(token_counts),
        computed_tokens=to_column(computed),
        taken_counts=to_column(taken_counts),
        asks=to_column(rooms),
        token_ids=to_column(tokens),
        taken_block_ids=to_column(taken),
        table_counts=to_column(table_counts),
    )
