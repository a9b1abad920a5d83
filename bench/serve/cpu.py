"""CPU time of this process, of its descendants and of everybody else, from Linux's /proc. Standard library only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)
"""Of the first line of /proc/stat: idle, and waiting for a disk. Stolen time counts as used, by others."""
_COUNTED_FIELDS = 8


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Over `seconds`: cores that this process and its descendants used on average, and those that others used."""

    seconds: float
    own_cores: float
    foreign_cores: float


class CpuMeter:
    """A context; `use` is set when it ends."""

    use: CpuUse

    def __enter__(self) -> CpuMeter:
        self._start = perf_counter(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        started, busy, own = self._start
        seconds = perf_counter() - started
        own_cores = (_own_seconds() - own) / seconds
        self.use = CpuUse(seconds, own_cores, max(0.0, (_busy_seconds() - busy) / seconds - own_cores))


def _busy_seconds() -> float:
    """CPU time that was used since the machine booted, on all cores."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:][:_COUNTED_FIELDS]]
    return (sum(fields) - sum(fields[index] for index in _IDLE_FIELDS)) / _TICKS_PER_SECOND


def _own_seconds() -> float:
    """CPU time of this process and its descendants, those that have been waited for included."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for process_id, parent_id, used in _processes():
        ticks[process_id] = used
        children[parent_id].append(process_id)
    total, todo = 0, [os.getpid()]
    while todo:
        process_id = todo.pop()
        total += ticks.get(process_id, 0)
        todo.extend(children[process_id])
    return total / _TICKS_PER_SECOND


def _processes() -> Iterator[tuple[int, int, int]]:
    """Id, parent's id and clock ticks of each process."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        # The name stands in brackets and may have anything in it. After it: state, parent, ..., four times in ticks.
        fields = stat.rpartition(")")[2].split()
        yield int(entry.name), int(fields[1]), sum(int(field) for field in fields[11:15])
