"""The engine's books without a second process: for tests, and for measuring what the split costs."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import NoReturn

from kvmanager.errors import KvError, NeverFits, PoolShort, QuotaShort, StaleEpoch, UnknownPool
from kvmanager.manager import KvManager
from kvmanager.pool import Pool
from kvmanager.types import Append, BlockCopy, CacheScope, Grant, Retention
from model_runner.books import (
    Admission,
    AllocationRequest,
    BlockGrant,
    BooksLost,
    BooksRefused,
    BooksTaken,
    CopyOrder,
    Growth,
    PoolFacts,
    SequenceUpdate,
)
from services.cache_options import DEFAULT_CACHE, CacheOptions

_NO_ROOM = (PoolShort.reason, QuotaShort.reason, NeverFits.reason)
"""Why a growth is refused that somebody can do without."""


class InProcessBooks:
    """A model_runner.books.KvBooks over a KvManager of this process, with the semantics of the gRPC one.

    Not thread-safe: whoever else uses the manager must do so on the engine's thread, or between its calls.
    """

    def __init__(self, manager: KvManager, pool_id: str = "default", cache: CacheOptions = DEFAULT_CACHE) -> None:
        self._manager = manager
        self._pool_id = pool_id
        self._cache = cache
        self._runner_id = uuid.uuid4().hex
        self._opened: tuple[str, int] | None = None

    def open(self, facts: PoolFacts) -> None:
        """Declares the pool, and ends what this runner held in it.

        Raises BooksRefused when it is open with other facts, or when they make no sense.
        """
        try:
            opening = self._manager.open_pool(self._pool_id, self._cache.spec(facts), self._runner_id)
        except KvError as error:
            _refuse(error)
        self._opened = (self._manager.boot_id, opening.epoch)
        held = [Append(name) for name, each in opening.pool.live.items() if each.owner == opening.epoch]
        opening.pool.free(held, preempted=True, caller=opening.epoch)

    def allocate(self, request: AllocationRequest) -> Admission | None:
        """Blocks for all tokens of a new sequence; None while the pool is too full."""
        try:
            allocation = self._pool().allocate(
                request.sequence_id,
                request.token_ids,
                scope=CacheScope(salt=request.cache_salt),
                retention=Retention(request.retention.priority, request.retention.pin_seconds),
                headroom_blocks=request.headroom_blocks,
                skip_cache_read=request.skip_cache_read,
                skip_cache_write=request.skip_cache_write,
                resumed=request.resumed,
                promised_tokens=request.promised_tokens,
                caller=self._epoch,
            )
        except KvError as error:
            return _unless_short(error)
        return Admission(allocation.block_ids, allocation.cached_tokens, _copies(allocation.copies))

    def append(self, updates: Sequence[SequenceUpdate]) -> Growth | None:
        """Commits and grows all of the sequences; None while the pool is too full for all."""
        try:
            grants = self._pool().append(_appends(updates), caller=self._epoch)
        except KvError as error:
            return _unless_short(error)
        return Growth([_grant(each) for each in grants])

    def extend(self, updates: Sequence[SequenceUpdate]) -> Growth:
        """append() of guesses, for each sequence that there is room for."""
        grants: list[BlockGrant] = []
        stalled: list[str] = []
        for update in updates:
            try:
                grants += map(_grant, self._pool().append(_appends([update]), caller=self._epoch))
            except KvError as error:
                if error.reason not in _NO_ROOM:
                    _refuse(error)
                stalled.append(update.sequence_id)
        return Growth(grants, frozenset(stalled))

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Takes back what was told behind the first `num_tokens` tokens."""
        try:
            self._pool().truncate(sequence_id, num_tokens, caller=self._epoch)
        except KvError as error:
            _refuse(error)

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        """Gives each child the parent's block table."""
        try:
            self._pool().fork(parent_id, child_ids, caller=self._epoch)
        except KvError as error:
            _refuse(error)

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        """Commits a last time and ends the sequences; unknown ones are ignored."""
        try:
            self._pool().free(_appends(updates), preempted=preempted, caller=self._epoch)
        except KvError as error:
            _refuse(error)

    def flush(self) -> None:
        """Nothing is left to say, but whether the books are lost."""
        try:
            self._pool()
        except KvError as error:
            _refuse(error)

    @property
    def away(self) -> str:
        """Never: it lives here."""
        return ""

    def close(self) -> None:
        """Gives up the pool; never raises."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        try:
            self._manager.close_pool(self._pool_id, opened[1])
        except KvError:
            # Another runner has the pool by now, or it was closed: nothing of ours is left in it.
            return

    @property
    def _epoch(self) -> int:
        return self._opened[1] if self._opened else 0

    def _pool(self) -> Pool:
        if self._opened is None:
            raise BooksLost(f"Pool {self._pool_id!r} was never opened.")
        return self._manager.pool(self._pool_id, self._opened[1])


def _unless_short(error: KvError) -> None:
    """Nothing for a pool that is too full; anything else is raised, a quota that is too full as well."""
    if error.reason != PoolShort.reason:
        _refuse(error)


def _refuse(error: KvError) -> NoReturn:
    if isinstance(error, StaleEpoch):
        raise BooksTaken(str(error)) from error
    if isinstance(error, UnknownPool):
        raise BooksLost(str(error)) from error
    raise BooksRefused(str(error), error.reason) from error


def _appends(updates: Sequence[SequenceUpdate]) -> list[Append]:
    return [Append(each.sequence_id, each.token_ids, each.computed_tokens, each.ahead) for each in updates]


def _grant(grant: Grant) -> BlockGrant:
    return BlockGrant(grant.sequence_id, grant.first_index, grant.block_ids, _copies(grant.copies))


def _copies(orders: Iterable[BlockCopy]) -> tuple[CopyOrder, ...]:
    return tuple(CopyOrder(each.source, each.target, each.num_tokens) for each in orders)
