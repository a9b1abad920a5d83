"""Pools by name: who opened each, under which epoch, and what late callers are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum

from kvmanager.clock import Clock, no_time
from kvmanager.errors import PoolDiffers, SessionTaken, StaleEpoch, UnknownPool
from kvmanager.events import EventLog
from kvmanager.runner_pool import RunnerPool
from kvmanager.types import PoolSpec
from kvmanager.validation import check_id


@dataclass(frozen=True, slots=True)
class Opening:
    """An open pool, the number of its opening, and whether this call made it."""

    epoch: int
    created: bool
    pool: RunnerPool


@dataclass(frozen=True, slots=True)
class _Open:
    """over: a session has ended, and nobody speaks for this epoch any more."""

    epoch: int
    runner_id: str
    pool: RunnerPool
    over: bool = False


class KvManager:
    """The pools of one process. `boot_id` tells this process's books from those of any other.

    Epochs count from `epoch_base`: a process that takes a higher one than those before it never gives out an epoch
    that an earlier process gave, so that what is late from then is refused. clock: seconds that only grow, for pins.
    """

    def __init__(self, boot_id: str, epoch_base: int = 0, clock: Clock = no_time) -> None:
        self.boot_id = boot_id
        self._clock = clock
        self._events: dict[str, EventLog] = {}
        self._epoch_base = epoch_base
        self._open: dict[str, _Open] = {}
        self._last_epoch: dict[str, int] = {}
        self.on_epoch_over: Callable[[str], None] | None = None
        """Called with a pool's id when it is opened anew or closed; it must not raise."""

    def open_pool(self, pool_id: str, spec: PoolSpec, runner_id: str) -> Opening:
        """Opens a pool for the runner process `runner_id`.

        The same runner with the same facts gets what it has. Another runner gets an empty pool under the next epoch,
        for the K/V went with the process that computed it. Other facts: PoolDiffers.
        """
        known = self._check_opening(pool_id, spec, runner_id)
        if known is not None and known.runner_id == runner_id and not known.over:
            return Opening(known.epoch, False, known.pool)
        return self._open_anew(pool_id, spec, runner_id)

    def open_session(self, pool_id: str, spec: PoolSpec, runner_id: str, *, restores: bool = False) -> Opening:
        """Opens an empty pool under the next epoch, whoever had it before. Raises PoolDiffers.

        restores: the runner had it before, so that another one that has opened it meanwhile keeps it (SessionTaken).
        """
        known = self._check_opening(pool_id, spec, runner_id)
        if restores and known is not None and known.runner_id != runner_id:
            raise SessionTaken(
                f"pool {pool_id!r} was opened by another runner since, under epoch {known.epoch}",
                pool_id=pool_id,
                epoch=known.epoch,
            )
        opening = self._open_anew(pool_id, spec, runner_id)
        opening.pool.listen()
        return opening

    def session_pool(self, pool_id: str, epoch: int) -> RunnerPool:
        """The pool of a session. Raises SessionTaken when another opening has followed, UnknownPool."""
        known = self._known(pool_id)
        if known.epoch != epoch or known.over:
            raise SessionTaken(
                f"pool {pool_id!r} is in epoch {known.epoch}, and this session speaks for epoch {epoch}: "
                "another opening has taken the pool",
                pool_id=pool_id,
                epoch=known.epoch,
                caller_epoch=epoch,
            )
        return known.pool

    def speaks_for(self, pool_id: str, epoch: int) -> bool:
        """Whether a session of that epoch has the pool: it is the pool's last opening, and has not ended."""
        known = self._open.get(pool_id)
        return known is not None and known.epoch == epoch and not known.over

    def end_session(self, pool_id: str, epoch: int) -> int:
        """Ends the sequences of a session, and its epoch; the cached blocks stay until the next opening.

        Returns how many sequences it ended: none when another opening has followed, or the pool is closed.
        """
        if not self.speaks_for(pool_id, epoch):
            return 0
        known = self._open[pool_id]
        self._open[pool_id] = _Open(epoch, known.runner_id, known.pool, over=True)
        known.pool.stop_listening()
        return known.pool.end_runner(epoch)

    def close_pool(self, pool_id: str, epoch: int = 0) -> int:
        """Forgets the pool and returns how many sequences lived in it. Raises UnknownPool, StaleEpoch."""
        pool = self.pool(pool_id, epoch)
        del self._open[pool_id]
        self._events[pool_id].cleared()
        self._tell_over(pool_id)
        return len(pool.live)

    def events(self, pool_id: str) -> EventLog:
        """The events of the pool of that id; their numbers go on when it is opened anew. Raises UnknownPool."""
        self._known(pool_id)
        return self._events[pool_id]

    def pool(self, pool_id: str, epoch: int = 0) -> RunnerPool:
        """The open pool; epoch 0 is not compared. Raises UnknownPool, StaleEpoch."""
        known = self._known(pool_id)
        if epoch and (epoch != known.epoch or known.over):
            raise StaleEpoch(
                f"pool {pool_id!r} is in epoch {known.epoch}, the caller speaks for epoch {epoch}: open the pool again",
                pool_id=pool_id,
                epoch=known.epoch,
                caller_epoch=epoch,
            )
        return known.pool

    def epoch(self, pool_id: str) -> int:
        """The number of the pool's opening. Raises UnknownPool."""
        return self._known(pool_id).epoch

    def knows(self, pool_id: str) -> bool:
        """Whether a pool of that id is open."""
        return pool_id in self._open

    def pools(self) -> list[tuple[str, RunnerPool]]:
        """The open pools by id."""
        return [(pool_id, self._open[pool_id].pool) for pool_id in sorted(self._open)]

    def _check_opening(self, pool_id: str, spec: PoolSpec, runner_id: str) -> _Open | None:
        check_id("a pool id", pool_id)
        check_id("a runner id", runner_id)
        known = self._open.get(pool_id)
        if known is not None:
            self._check_facts(pool_id, known.pool.spec, spec)
        return known

    def _open_anew(self, pool_id: str, spec: PoolSpec, runner_id: str) -> Opening:
        pool = RunnerPool(spec, self._clock, self._new_events(pool_id))
        epoch = self._last_epoch.get(pool_id, self._epoch_base) + 1
        self._last_epoch[pool_id] = epoch
        self._open[pool_id] = _Open(epoch, runner_id, pool)
        self._tell_over(pool_id)
        return Opening(epoch, True, pool)

    def _tell_over(self, pool_id: str) -> None:
        if self.on_epoch_over is not None:
            self.on_epoch_over(pool_id)

    def _new_events(self, pool_id: str) -> EventLog:
        """The log of a pool that is opened: what an earlier opening had cached is cleared."""
        known = self._events.setdefault(pool_id, EventLog())
        if pool_id in self._open:
            known.cleared()
        return known

    def _known(self, pool_id: str) -> _Open:
        try:
            return self._open[pool_id]
        except KeyError:
            raise UnknownPool(
                f"no pool {pool_id!r} is open; open ones: {', '.join(sorted(self._open)) or 'none'}", pool_id=pool_id
            ) from None

    def _check_facts(self, pool_id: str, known: PoolSpec, asked: PoolSpec) -> None:
        if known == asked:
            return
        names = [field.name for field in fields(PoolSpec)]
        names = [name for name in names if getattr(known, name) != getattr(asked, name)]
        facts = ", ".join(f"{name} {_shown(known, name)} (asked for {_shown(asked, name)})" for name in names)
        raise PoolDiffers(
            f"pool {pool_id!r} is open with {facts}; close it first or take another pool id",
            pool_id=pool_id,
            **{name: _shown(known, name) for name in names},
        )


def _shown(spec: PoolSpec, name: str) -> object:
    """A fact as people write it: index radix, not IndexKind.RADIX."""
    value = getattr(spec, name)
    return value.value if isinstance(value, Enum) else value
