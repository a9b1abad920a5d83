"""The systems of a comparison while it runs: each is started when it is first needed, and skipped when it fails."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from bench.serve.driven import DrivenSystem, DriverFailed
from bench.serve.system import Run
from bench.serve.systems import SYSTEMS, NotInstalled
from bench.serve.workloads import Workload


class Fleet:
    """Systems that are started for workloads with one cache size; a context, at whose end they are stopped."""

    def __init__(self, peers: Path | None) -> None:
        self._peers = peers
        self._systems: dict[str, DrivenSystem | None] = {}
        """None: it is not to be had."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for system in self._systems.values():
            if system is not None:
                system.stop()

    def system(self, name: str, workload: Workload) -> DrivenSystem | None:
        """The system of this name, ready for this workload; None, after a line that says why, where it cannot be."""
        if name not in self._systems:
            log = Path(tempfile.gettempdir()) / f"bench-serve-{os.getpid()}-{name}.log"
            try:
                self._systems[name] = DrivenSystem(SYSTEMS[name], workload, self._peers, log)
            except (NotInstalled, DriverFailed) as error:
                self._give_up(name, error)
        return self._systems[name]

    def run(self, name: str, workload: Workload) -> Run | None:
        """Plays the workload on a system that system() gave; None, after a line that says why, when it fails."""
        system = self._systems[name]
        assert system is not None
        try:
            return system.run(workload)
        except DriverFailed as error:
            self._give_up(name, error)
            return None

    def _give_up(self, name: str, error: Exception) -> None:
        print(f"skipped: {error}", file=sys.stderr)
        self._systems[name] = None
