"""Gives up the block that earns the fewest hits per unit of room: its class's best hits-per-time from its age on.

Every cached block has a class, what its chain tells about it: how often it was used or of which turn of a conversation
it is, how much its last prompt added behind the reused part, how long that had waited, and whether the block ended the
prompt. `return_model` learns what a block of a class is worth at an age: the Gittins index (Gittins, 1979), as hit
density (LHD, Beckmann et al., NSDI 2018) in a cache. `trial` keeps to the order of LRU until the policy hits more.

Time is counted in stored blocks: only these need room. Ages are in half octaves of a sixteenth of the pool, so nothing
here depends on the size of the pool or on the speed of the machine. Blocks of one class released in the same eighth of
a turnover of the pool form a group; groups are ranked again as time goes on, and each verb is O(log groups).

What happens to a run is counted once, with the number of its blocks. A run that was given up leaves one ghost, under
the name of its last block: whoever uses that has used those before it.
"""

from __future__ import annotations

from typing import Final

from kvmanager.ghosts import (
    MOST_BLOCKS,
    MOST_TURNS,
    MOST_USES,
    Ghosts,
    blocks_kept,
    class_kept,
    remembered,
    turn_kept,
    uses_kept,
    waited,
)
from kvmanager.orders import Order, ReleaseOrder, WorthOrder
from kvmanager.policy import EvictionPolicy
from kvmanager.residency import Residency
from kvmanager.return_model import AGES, ReturnModel, age_bucket, class_of
from kvmanager.runs import NO_GROUP, Run, Runs
from kvmanager.trial import Trial
from kvmanager.waiting import Waiting

GROUPS_PER_TURNOVER: Final = 8
MEMORY_TURNOVERS: Final = 64
"""How much of the past counts, in turnovers of the pool, and at least MEMORY_BLOCKS."""
MEMORY_BLOCKS: Final = 1 << 17
LEARN_BLOCKS: Final = 4096
"""Learning is due after the first turnover, then once per turnover, and no sooner than after so many stored blocks."""


class AdaptiveEviction(EvictionPolicy):
    """The policy of this module, for blocks 1 to `num_blocks` - 1."""

    # fmt: off
    __slots__ = (
        "_cached", "_ghosts", "_learned_at", "_model", "_next_learning", "_now", "_order", "_period", "_releases",
        "_room", "_runs", "_seen", "_trial", "_unit", "_waiting",
    )
    # fmt: on

    def __init__(self, num_blocks: int, residency: Residency | None = None) -> None:
        super().__init__(residency or Residency(num_blocks))
        self._room = max(1, num_blocks - 2)
        self._runs = Runs(num_blocks)
        self._cached = 0
        self._ghosts = Ghosts(self._room)
        self._unit = max(1, self._room // 16)
        self._waiting = Waiting()
        self._model = ReturnModel(self._unit)
        self._trial = Trial()
        self._order: Order = ReleaseOrder(self._runs)
        self._releases = 0
        self._now = 0
        self._period = max(LEARN_BLOCKS, self._room)
        self._next_learning = self._room
        self._learned_at = 0
        self._seen = 0.0

    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        run = Run(blocks[:], depth)
        self._runs.add(run)
        self.residency.stored(run, names)
        self._now += len(blocks)
        for place in self._ghosts.found(names):
            self._recall(blocks[place], names[place])

    def hit(self, blocks: list[int]) -> None:
        for run in self._runs.cover(blocks):
            if run.group != NO_GROUP:
                self._order.remove(run)
            if run.cached:
                run.cached = False
                self.residency.woken(run)
                self._leave_ghost(run)
                count = len(run.blocks)
                self._cached -= count
                self._waiting.remove(run.kind, run.stamp // self._unit, count)
                run.wait = self._returned(run.kind, (self._now - run.stamp) // self._unit, count, True)
            run.uses = min(MOST_USES, run.uses + 1)

    def release(self, blocks: list[int]) -> None:
        self._releases += 1
        runs = self._runs.cover(blocks[::-1])
        fresh, turn, wait = 0, 1, 0
        for run in reversed(runs):
            if run.uses > 1:
                # A prompt that is the first to continue what the one before it added is the next turn.
                if run.uses == 2:
                    turn = min(MOST_TURNS, run.turn + 1)
                    wait = run.wait
                break
            fresh += len(run.blocks)
        level, uses = turn, 1
        kind = class_of(level, fresh, wait, 0)
        for run in reversed(runs):
            # Whoever used a block used all before it, even if only some of these are remembered.
            if run.uses > uses:
                uses = run.uses
                if uses > level:
                    level = uses
                    wait = run.wait
                kind = class_of(level, fresh, wait, 0)
            run.uses, run.turn, run.wait, run.kind = uses, turn, 0, kind
            run.stamp, run.release, run.cached = self._now, self._releases, True
        self.residency.idled(runs)
        if runs:
            joined = self._runs.join(runs)
            end = self._runs.end(joined[-1])
            end.kind += 1
            if end is not joined[-1]:
                joined.append(end)
            for run in joined:
                self._waiting.add(run.kind, self._now // self._unit, len(run.blocks))
            self._cached += len(blocks)
        self._model.settle()
        if self._now >= self._next_learning:
            self._learn()

    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        run = self._runs.of(blocks[0])
        if run.group != NO_GROUP:
            self._order.remove(run)
        self.residency.evicted(run, names)
        if not run.gone:
            run.gone_name = names[0]
        run.gone += len(blocks)
        self._cached -= len(blocks)
        self._runs.shorten(run, len(blocks))
        if not run.blocks:
            self._leave_ghost(run)

    def forget(self, block: int) -> None:
        run = self._runs.ending(block)
        if run.cached:
            self._leave_ghost(run)
            self._cached -= 1
            self._lost(run.kind, run.stamp // self._unit, 1)
        self._runs.shorten(run, 1)

    def released_at(self, block: int) -> int:
        return self._runs.of(block).release

    # The order.

    def add(self, block: int) -> None:
        run = self._runs.ending(block)
        if run.group == NO_GROUP:
            self._order.add(run, self._now)

    def remove(self, block: int) -> None:
        run = self._runs.of(block)
        if run.group != NO_GROUP and run.blocks[-1] == block:
            self._order.remove(run)

    def victims(self, most: int) -> list[int]:
        return self._order.first(most, self._now)

    def offered(self) -> list[int]:
        return self._order.last_blocks()

    def _decide(self, trusted: bool) -> None:
        """The worths have changed; whether they decide from now on, or LRU."""
        if trusted != isinstance(self._order, WorthOrder):
            order = self._order
            self._order = self._by_worth() if trusted else ReleaseOrder(self._runs)
            for run in sorted(map(self._runs.of, order.last_blocks()), key=_release_of):
                order.remove(run)
                self._order.add(run, run.stamp)
        if isinstance(self._order, WorthOrder):
            self._order.rank(self._now)

    def _by_worth(self) -> WorthOrder:
        return WorthOrder(self._model, self._unit, max(1, self._room // GROUPS_PER_TURNOVER))

    # Lives of blocks.

    def _returned(self, kind: int, units: int, count: int, hit: bool) -> int:
        """So many blocks that waited for so long are used again. Returns how long as an age bucket."""
        wait = age_bucket(units)
        cell = kind * AGES + wait
        self._model.count_returned(cell, count)
        self._trial.used(cell, count, hit)
        return wait

    def _lost(self, kind: int, time: int, count: int) -> None:
        """So many blocks that wait since `time` are remembered no more."""
        self._waiting.remove(kind, time, count)
        self._model.gone[kind * AGES + age_bucket(self._now // self._unit - time)] += count

    def _leave_ghost(self, run: Run) -> None:
        """Remembers what is gone of a run; but not the last block of a prompt."""
        gone, name, time = run.gone, run.gone_name, run.stamp // self._unit
        if not gone:
            return
        run.gone, run.gone_name = 0, b""
        if run.kind % 2 == 0:
            now, blocks = self._now // self._unit, min(gone, MOST_BLOCKS)
            ghost = self._ghosts.put(name, time, blocks, remembered(run.kind, run.uses, run.turn), now)
            if ghost:
                self._lost(class_kept(ghost), now - waited(ghost, now), blocks_kept(ghost))
            gone -= blocks
        if gone:
            self._lost(run.kind, time, gone)

    def _recall(self, block: int, name: bytes) -> None:
        """A block was stored again: its ghost tells its uses, turn and last wait."""
        ghost = self._ghosts.take(name)
        if not ghost:  # Two names were taken for the same.
            return
        now = self._now // self._unit
        kind, units, count = class_kept(ghost), waited(ghost, now), blocks_kept(ghost)
        self._waiting.remove(kind, now - units, count)
        run = self._runs.end(self._runs.ending(block))
        run.uses = min(uses_kept(ghost) + 1, MOST_USES)
        run.turn = turn_kept(ghost)
        run.wait = self._returned(kind, units, count, False)

    def _learn(self) -> None:
        elapsed = self._now - self._learned_at
        self._learned_at = self._now
        self._next_learning = self._now + self._period
        waiting = self._waiting.by_cell(self._now // self._unit)
        self._trial.judge(self._model.worth, waiting, self._cached)
        self._model.learn(waiting)
        self._trial.judge_early(self._model.worth, waiting, self._cached, self._model.together())
        self._trial.count_anew()
        self._decide(self._trial.trusted)
        self._seen += elapsed
        memory = max(MEMORY_TURNOVERS * self._room, MEMORY_BLOCKS)
        if self._seen > memory:
            kept = max(0.0, 1.0 - elapsed / memory)
            self._seen *= kept
            self._model.fade(kept)


def _release_of(run: Run) -> int:
    return run.release
