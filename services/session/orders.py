"""The orders of the next step message, in the order in which the engine gave them."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv.v1 import kv_manager_pb2 as pb

from model_runner.books import AllocationRequest
from model_runner.request import Retention
from services.columns import to_column
from services.session.held import Held


class OrderBook:
    """Collects orders until a message takes them. News of sequences are gathered as long as nothing comes between."""

    def __init__(self) -> None:
        self._orders: list[pb.SessionOrder] = []
        self._news: dict[int, Held] = {}
        self._askers: list[Held] = []

    @property
    def empty(self) -> bool:
        return not self._orders and not self._news

    def clear(self) -> None:
        """Forgets what is said otherwise."""
        self._orders, self._news, self._askers = [], {}, []

    def tell(self, held: Held) -> None:
        """The sequence has news: tokens, computed ones, taken blocks, or a wish for room."""
        self._news[held.handle] = held

    def end(self, sequences: list[Held], preempted: bool) -> None:
        """They end, with their last news."""
        for held in sequences:
            self._news.pop(held.handle, None)
        self._close_news()
        news, _ = _progress(sequences)
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

    def admit(self, handle: int, request: AllocationRequest) -> None:
        """A sequence is to begin; it must be the last order of its message."""
        self._close_news()
        self._orders.append(pb.SessionOrder(admit=_admit_order(handle, request)))

    def take(self) -> tuple[list[pb.SessionOrder], list[Held]]:
        """The orders, and the sequences that ask for room in them."""
        self._close_news()
        orders, askers = self._orders, self._askers
        self.clear()
        return orders, askers

    def _close_news(self) -> None:
        if self._news:
            progress, askers = _progress(self._news.values())
            self._orders.append(pb.SessionOrder(progress=progress))
            self._askers += askers
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
        resumed=request.resumed,
        retention=wire_retention(request.retention),
    )


def _progress(sequences: Iterable[Held]) -> tuple[pb.Progress, list[Held]]:
    """The news of sequences, which are sent from now on, and those that ask for room."""
    handles, token_counts, computed, taken_counts, asks, table_counts = [], [], [], [], [], []
    tokens: list[int] = []
    taken: list[int] = []
    askers: list[Held] = []
    for held in sequences:
        fresh = held.tokens[held.sent :]
        handles.append(held.handle)
        token_counts.append(len(fresh))
        tokens.extend(fresh)
        computed.append(held.computed)
        taken_counts.append(len(held.taken))
        taken.extend(held.taken)
        table_counts.append(held.taken_at if held.taken else len(held.blocks))
        asks.append(max(1, held.wants - len(held.tokens) + 1) if held.wants else 0)
        if held.wants:
            askers.append(held)
        held.mark_sent()
    progress = pb.Progress(
        handles=to_column(handles),
        token_counts=to_column(token_counts),
        computed_tokens=to_column(computed),
        taken_counts=to_column(taken_counts),
        asks=to_column(asks),
        token_ids=to_column(tokens),
        taken_block_ids=to_column(taken),
        table_counts=to_column(table_counts),
    )
    return progress, askers
