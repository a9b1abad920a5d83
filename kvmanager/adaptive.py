"""Gives up the block that earns the fewest hits per unit of room: its class's best hits-per-time from its age on.

Every cached block has a class, what its chain tells about it: how often it was used or of which turn of a conversation
it is, how much its last prompt added behind the reused part, how long that had waited, and whether the block ended the
prompt. `return_model` learns what a block of a class is worth at an age: the Gittins index (Gittins, 1979), as hit
density (LHD, Beckmann et al., NSDI 2018) in a cache. `recency_guard` falls back on the order of LRU where that hits
more.

Time is counted in stored blocks: only these need room. Ages are in half octaves of a sixteenth of the pool, so nothing
here depends on the size of the pool or on the speed of the machine. Blocks of one class released in the same eighth of
a turnover of the pool form a group; groups are ranked again as time goes on, and each verb is O(log groups).

One block in eight is watched: it is counted and leaves a ghost. That is enough because chains come back as a whole: a
prompt that uses a known block has used all blocks before it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from kvmanager.ghosts import MOST_TURNS, MOST_USES, TIMES, Ghosts, class_kept, remembered, turn_kept, uses_kept, waited
from kvmanager.policy import EvictionPolicy
from kvmanager.recency_guard import RecencyGuard
from kvmanager.residency import Residency
from kvmanager.return_model import AGES, CLASSES, ReturnModel, age_bucket, class_of
from kvmanager.runs import NO_GROUP, Run, Runs

WATCHED: Final = 8
"""Every so manieth block of a chain is watched, and of the first so many one at random, by its name."""
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
        "_epoch", "_ghost_ages", "_ghosts", "_group_width", "_groups", "_guard", "_hand", "_heads", "_learned_at",
        "_model", "_next_learning", "_now", "_period", "_room", "_runs", "_seen", "_tails", "_tick", "_unit",
        "_watched",
    )
    # fmt: on

    def __init__(self, num_blocks: int, residency: Residency | None = None) -> None:
        super().__init__(residency or Residency(num_blocks))
        self._room = max(1, num_blocks - 2)
        self._runs = Runs(num_blocks)
        self._watched = bytearray(num_blocks)
        self._ghosts = Ghosts(self._room)
        self._hand = 0
        self._unit = max(1, self._room // 16)
        self._tick = max(1, self._room // 64)  # of the ghosts and the guard
        self._ghost_ages = bytes([age_bucket(ticks * self._tick // self._unit) for ticks in range(TIMES)])
        """Age buckets by the ticks that a ghost has waited."""
        self._model = ReturnModel(self._unit)
        self._guard = RecencyGuard()
        self._group_width = max(1, self._room // GROUPS_PER_TURNOVER)
        # A group is epoch * CLASSES + class, a doubly linked list of runs, each on offer with its last block.
        self._heads: dict[int, Run] = {}
        self._tails: dict[int, Run] = {}
        self._groups: list[tuple[float, int]] = []
        """A heap of (worth, group); empty groups are skipped when they surface."""
        self._epoch = 0
        self._now = 0
        self._period = max(LEARN_BLOCKS, self._room)
        self._next_learning = self._room
        self._learned_at = 0
        self._seen = 0.0

    def store(self, blocks: list[int], names: list[bytes], depth: int) -> None:
        before = self._now
        run = Run(blocks[:], depth)
        self._runs.add(run)
        self.residency.stored(run, names)
        if len(blocks) == 1 and depth >= WATCHED - 1 and (depth + 1) % WATCHED:
            # The common case: a sequence grows by a block that is not watched.
            self._now = before + 1
            return
        places = [place for place in range(min(len(names), WATCHED - 1 - depth)) if names[place][0] % WATCHED == 0]
        for place in [*places, *_later_places(depth, 0, len(blocks))]:
            self._now = before + place + 1
            self._watched[blocks[place]] = 1
            self._recall(blocks[place], names[place])
            self._guard.room += 1
            self._count_waiting()
        self._now = before + len(names)

    def hit(self, blocks: list[int]) -> None:
        for run in self._runs.cover(blocks):
            if run.group != NO_GROUP:
                self._unlink(run)
            run.uses = min(MOST_USES, run.uses + 1)
            if run.cached:
                run.cached = False
                self.residency.woken(run)
                run.wait = age_bucket((self._now - run.stamp) // self._unit)
                watched = self._num_watched(run)
                self._model.count_returned(run.kind * AGES + run.wait, watched)
                self._guard.used(run.stamp // self._tick, True, watched)

    def release(self, blocks: list[int]) -> None:
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
        level, uses, watched = turn, 1, 0
        kind = class_of(level, fresh, wait, 0)
        for run in reversed(runs):
            # Whoever used a block used all before it, even if only some of these are watched and remembered.
            if run.uses > uses:
                uses = run.uses
                if uses > level:
                    level = uses
                    wait = run.wait
                kind = class_of(level, fresh, wait, 0)
            run.uses, run.turn, run.wait, run.kind = uses, turn, 0, kind
            run.stamp, run.cached = self._now, True
            watched += self._num_watched(run)
        self.residency.idled(runs)
        if runs:
            self._runs.end(self._runs.join(runs)[-1]).kind += 1
        self._model.settle()
        if watched:
            self._guard.released(self._now // self._tick, watched)
        if self._now >= self._next_learning:
            self._learn()

    def evicted(self, blocks: list[int], names: list[bytes]) -> None:
        run = self._runs.of(blocks[0])
        if run.group != NO_GROUP:
            self._unlink(run)
        self.residency.evicted(run, names)
        end = len(run.blocks)
        start, watched, gone = end - len(blocks), self._watched, list[bytes]()
        later = _later_places(run.depth, start, end)
        if later:
            # Every so manieth from the last of them on, for the last of the chain goes first.
            last = end - 1 - later[-1]
            gone = names[last::WATCHED]
            for block in blocks[last::WATCHED]:
                watched[block] = 0
        if start + run.depth < WATCHED - 1:
            for place in reversed(self._early_places(run, start)):
                watched[run.blocks[place]] = 0
                gone.append(names[end - 1 - place])
        self._leave_ghosts(run, gone)
        self._runs.shorten(run, len(blocks))

    def forget(self, block: int) -> None:
        run = self._runs.of(block)
        if self._watched[block]:
            self._watched[block] = 0
            self._guard.room -= 1
            if run.cached:
                self._model.gone[self._cell(run)] += 1.0
                self._guard.lost(run.stamp // self._tick)
        self._runs.drop(block)

    def released_at(self, block: int) -> int:
        return self._runs.of(block).stamp

    # The order.

    def add(self, block: int) -> None:
        run = self._runs.ending(block)
        if run.group != NO_GROUP:
            return
        group = run.group = run.stamp // self._group_width * CLASSES + run.kind
        run.before = run.after = None
        head = self._heads.get(group)
        if head is None:
            self._heads[group] = self._tails[group] = run
            heappush(self._groups, (self._worth_of(group), group))
        elif run.stamp == self._now:
            tail = self._tails[group]
            self._tails[group] = tail.after = run
            run.before = tail
        else:
            # Its last continuation has just been given up: it is as old as that.
            self._heads[group] = head.before = run
            run.after = head

    def remove(self, block: int) -> None:
        run = self._runs.of(block)
        if run.group != NO_GROUP and run.blocks[-1] == block:
            self._unlink(run)

    def victims(self, most: int) -> list[int]:
        if self._now // self._group_width != self._epoch:
            self._rank_groups()
        groups, heads = self._groups, self._heads
        if not heads:
            return []
        while groups[0][1] not in heads:
            heappop(groups)
        run = heads[groups[0][1]]
        if run.stamp == self._now and run.after is not None:
            # The block before it would enter behind the others of this moment.
            most = 1
        return run.blocks[: -most - 1 : -1]

    def offered(self) -> list[int]:
        found: list[int] = []
        for head in self._heads.values():
            run: Run | None = head
            while run is not None:
                found.append(run.blocks[-1])
                run = run.after
        return found

    # Groups.

    def _worth_of(self, group: int) -> float:
        if not self._guard.trusted:
            return 0.0
        age = self._now - group // CLASSES * self._group_width
        return self._model.worth[group % CLASSES * AGES + age_bucket(age // self._unit)]

    def _unlink(self, run: Run) -> None:
        before, after, group = run.before, run.after, run.group
        run.group = NO_GROUP
        run.before = run.after = None
        if before is not None:
            before.after = after
        elif after is not None:
            self._heads[group] = after
        else:
            del self._heads[group], self._tails[group]
            return
        if after is not None:
            after.before = before
        elif before is not None:
            self._tails[group] = before

    def _rank_groups(self) -> None:
        self._epoch = self._now // self._group_width
        self._groups = [(self._worth_of(group), group) for group in self._heads]
        heapify(self._groups)

    # Lives of watched blocks.

    def _num_watched(self, run: Run) -> int:
        early = self._early_places(run, 0) if run.depth < WATCHED - 1 else []
        return len(early) + len(_later_places(run.depth, 0, len(run.blocks)))

    def _early_places(self, run: Run, start: int) -> list[int]:
        """The places in a run, from `start` on, of the blocks that are watched for their names."""
        blocks, watched = run.blocks, self._watched
        return [place for place in range(start, min(len(blocks), WATCHED - 1 - run.depth)) if watched[blocks[place]]]

    def _cell(self, run: Run) -> int:
        return run.kind * AGES + age_bucket((self._now - run.stamp) // self._unit)

    def _ghost_cell(self, ghost: int) -> int:
        return class_kept(ghost) * AGES + self._ghost_ages[waited(ghost, self._now // self._tick)]

    def _leave_ghosts(self, run: Run, names: list[bytes]) -> None:
        """Watched blocks of a run are given up, in this order."""
        self._guard.room -= len(names)
        now = self._now // self._tick
        kept = remembered(run.kind, run.uses, run.turn)
        for lost in self._ghosts.put(names, run.stamp // self._tick, kept, now):
            self._model.gone[self._ghost_cell(lost)] += 1.0
            self._guard.lost(now - waited(lost, now))

    def _recall(self, block: int, name: bytes) -> None:
        """A watched block was stored: its ghost, if it has one, tells its uses, turn and last wait."""
        ghost = self._ghosts.take(name)
        if not ghost:
            return
        cell = self._ghost_cell(ghost)
        self._model.count_returned(cell, 1)
        now = self._now // self._tick
        self._guard.used(now - waited(ghost, now), False)
        run = self._runs.end(self._runs.ending(block))
        run.uses = min(uses_kept(ghost) + 1, MOST_USES)
        run.turn = turn_kept(ghost)
        run.wait = cell % AGES

    def _count_waiting(self) -> None:
        """Counts a few of the blocks and ghosts that still wait for a use; all are once per half a turnover."""
        start, end = self._hand, self._hand + 2 * WATCHED
        counts = self._model.counting
        self._ghosts.count(start, end, self._now // self._tick, self._ghost_ages, counts)
        for run in self._runs.some(start, end, self._watched):
            if run.cached:
                counts[self._cell(run)] += 1
        self._hand = end
        if end >= len(self._watched):
            self._hand = 0
            self._model.counted_waiting()

    def _learn(self) -> None:
        elapsed = self._now - self._learned_at
        self._learned_at = self._now
        self._next_learning = self._now + self._period
        self._model.learn()
        self._guard.judge(self._now)
        self._rank_groups()
        self._seen += elapsed
        memory = max(MEMORY_TURNOVERS * self._room, MEMORY_BLOCKS)
        if self._seen > memory:
            kept = max(0.0, 1.0 - elapsed / memory)
            self._seen *= kept
            self._model.fade(kept)


def _later_places(depth: int, start: int, end: int) -> range:
    """Of the places start..end-1 of a run that begins at `depth`, those watched for their depth alone."""
    first = max(start, WATCHED - 1 - depth)
    return range(first + -(first + depth + 1) % WATCHED, end, WATCHED)
