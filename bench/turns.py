"""Times ways to do one thing on a machine that others use too: many short turns, of which the fast ones count.

A turn should take a few milliseconds at most, which is less than the kernel lets another process run at a stretch: then
some turns meet nobody. Ways that are compared take turns, each second round backwards, so that what changes slowly
(clock rate, others' bandwidth) meets all of them alike.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time

FAST = 0.05
"""Of a way's turns, this share was faster than the time that counts: the very fastest may be luck."""

Way = Callable[[int], object]
"""One turn. It is told the round, so that it can take other data in each."""

Clock = Callable[[], float]


def clock_for(threads: int) -> Clock:
    """One thread's own time on the CPU, which no other process is in; with more threads it must be the wall's."""
    return thread_time if threads == 1 else perf_counter


def compare(ways: Mapping[str, Way], seconds: float, clock: Clock = perf_counter) -> dict[str, float]:
    """Seconds of a turn of each way, after one that does not count. Goes on for so many seconds, 10 rounds at least."""
    for way in ways.values():
        way(0)
    took: dict[str, list[float]] = {name: [] for name in ways}
    end, turn = perf_counter() + seconds, 0
    while turn < 10 or perf_counter() < end:
        turn += 1
        for name in list(ways) if turn % 2 else reversed(list(ways)):
            start = clock()
            ways[name](turn)
            took[name].append(clock() - start)
    return {name: quantile(times, FAST) for name, times in took.items()}


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * len(times))]


@dataclass(frozen=True, slots=True)
class Load:
    """What other processes did while something was measured. busy: cores' worth of CPU time; stolen: of it, by others
    on the same host."""

    busy: float
    stolen: float

    def figures(self) -> dict[str, float]:
        """By name, for JSON."""
        return {"other_processes_cores": self.busy, "other_machines_cores": self.stolen}

    def __str__(self) -> str:
        return f"other processes used {self.busy:.1f} cores meanwhile, other machines {self.stolen:.1f}"


class LoadMeter:
    """Measures Load from its making until it is read. Children that have ended by then are no others. Linux only;
    elsewhere it says 0."""

    def __init__(self) -> None:
        self._start = self._read()

    def read(self) -> Load:
        then, now = self._start, self._read()
        wall, own, busy, stolen = (after - before for before, after in zip(then, now, strict=True))
        return Load(max(0.0, busy - own) / wall, stolen / wall) if busy else Load(0.0, 0.0)

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        """Seconds: the wall's, ours, all processes', and those that the host gave to others."""
        used = sum(os.times()[:4])
        stat = Path("/proc/stat")
        first = stat.read_text().split("\n", 1)[0].split()[1:] if stat.exists() else ["0"] * 8
        user, nice, system, _, _, irq, softirq, steal = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in first[:8])
        return perf_counter(), used, user + nice + system + irq + softirq, steal
