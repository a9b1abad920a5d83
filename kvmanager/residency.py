"""How long cached content lives, lies unused and is missed once it was given up, as histograms over all blocks.

The times are kept with the runs of a policy, so that what they cost does not depend on the number of blocks. Content
that ends in another way than by eviction is in no histogram.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from kvmanager.clock import Clock, no_time
from kvmanager.runs import Run

BOUNDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0)
"""Upper bounds of the histograms, in seconds."""

REMEMBERED: Final = 64
"""Names of evicted blocks that are remembered, the latest."""

TURNOVERS: Final = 4
"""One evicted block in so many is remembered that the names stand for this many evictions of the whole pool."""


class Durations:
    """A histogram. counts: by the least of BOUNDS that is not exceeded, then those above all. total: their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts: list[int] = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += times
        self.total += seconds * times

    def copy(self) -> Durations:
        """What it says now, for a reader in another thread."""
        copy = Durations()
        copy.counts[:] = self.counts
        copy.total = self.total
        return copy


class Residency:
    """What a policy tells of its runs.

    lifetime: from a block's content being computed to its eviction. idle: from its last use to its eviction.
    reuse_gap: from one use to the next, where nobody held it in between. missed: from its eviction until the same
    content was computed again, an estimate: each of the blocks that are remembered counts for `sampled`.
    """

    __slots__ = ("_clock", "_gone", "_seed", "_skip", "idle", "lifetime", "missed", "reuse_gap", "sampled")

    def __init__(self, num_blocks: int, clock: Clock = no_time) -> None:
        self._clock = clock
        self._seed = 1
        self._gone: dict[bytes, tuple[float, int]] = {}
        """When the remembered blocks were given up, and the index of each in its chain."""
        self.sampled = max(1, TURNOVERS * num_blocks // REMEMBERED)
        self._skip = self._next_gap()
        self.lifetime = Durations()
        self.idle = Durations()
        self.reuse_gap = Durations()
        self.missed = Durations()

    def stored(self, run: Run, names: list[bytes]) -> None:
        """The blocks of a run have new content, found under `names`."""
        run.born = run.idle_since = now = self._clock()
        for name in self._back(names, run.depth):
            self.missed.observe(now - self._gone.pop(name)[0], self.sampled)

    def idled(self, runs: list[Run]) -> None:
        """Nobody holds the blocks of some runs any more."""
        now = self._clock()
        for run in runs:
            run.idle_since = now

    def woken(self, run: Run) -> None:
        """The blocks of a run, which were cached, are held again."""
        self.reuse_gap.observe(self._clock() - run.idle_since, len(run.blocks))

    def evicted(self, run: Run, names: list[bytes]) -> None:
        """Blocks of a run, found under `names`, are given up."""
        now = self._clock()
        self.lifetime.observe(now - run.born, len(names))
        self.idle.observe(now - run.idle_since, len(names))
        place, last = self._skip, run.depth + len(run.blocks) - 1
        while place < len(names):
            self._remember(names[place], now, last - place)
            place += 1 + self._next_gap()
        self._skip = place - len(names)

    def _back(self, names: list[bytes], depth: int) -> list[bytes]:
        """Those of the names, the first at index `depth` of a chain, that are remembered."""
        gone = self._gone
        if len(names) < len(gone):
            return [name for name in names if name in gone]
        # Hashing many names takes longer. Each could only be at the index that it had.
        end = depth + len(names)
        return [name for name, (_, place) in gone.items() if depth <= place < end and names[place - depth] == name]

    def _remember(self, name: bytes, now: float, depth: int) -> None:
        self._gone.pop(name, None)
        self._gone[name] = now, depth
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]

    def _next_gap(self) -> int:
        """Blocks to pass over. At random, or prompts of one length would be remembered by the same block each time."""
        self._seed = self._seed * 1_103_515_245 + 12_345 & 0x7FFF_FFFF
        return (self._seed >> 8) % (2 * self.sampled - 1)
