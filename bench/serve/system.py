"""One system that serves: what its driver process needs of it, and what a run of a workload gives. Standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from bench.serve.cpu import CpuMeter, CpuUse
from bench.serve.player import Answer, Stream, play
from bench.serve.workloads import Workload


@dataclass(frozen=True, slots=True)
class Run:
    """A workload that was played. extra: further figures that only this system has, by name."""

    answers: tuple[Answer, ...]
    cpu: CpuUse
    extra: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Run:
        """What to_json() gave, from a pipe."""
        return Run(tuple(map(Answer.from_json, found["answers"])), CpuUse(**found["cpu"]), found["extra"])


class System(Protocol):
    """A system in its driver process. It is warm when its module's create() has returned it."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Of what was measured, by name."""
        ...

    async def run(self, workload: Workload) -> Run:
        """Plays the workload with nothing cached at first. Other work and set-up are outside of the times."""
        ...

    async def close(self) -> None:
        """Ends what was started."""
        ...


async def timed_run(workload: Workload, stream: Stream) -> Run:
    """The workload played on a system that streams."""
    with CpuMeter() as meter:
        answers = await play(workload, stream)
    return Run(tuple(answers), meter.use)
