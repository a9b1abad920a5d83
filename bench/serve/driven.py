"""The side of bench.serve that starts a system's driver process and hands it workloads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from bench.serve.system import Run
from bench.serve.systems import SystemSpec
from bench.serve.workloads import Workload

STOP_SECONDS = 30


class DriverFailed(Exception):
    """A driver that ended before its answer. The message names its log."""


class DrivenSystem:
    """A system in a process of its own, which serves workloads that have this one's cache size.

    Raises NotInstalled, and DriverFailed when it does not start. What it prints goes to `log`, at its end.
    """

    def __init__(self, spec: SystemSpec, workload: Workload, peers: Path | None, log: Path) -> None:
        self.name, self._log = spec.name, log
        self.is_busy = True
        """Whether an answer is due."""
        command, environment = spec.command(workload, peers), spec.environment(peers)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
            )
        try:
            self.versions: dict[str, str] = json.loads(self._answer())
        except BaseException:
            self.stop()
            raise

    @property
    def process_id(self) -> int:
        """Of the driver, whose children are the system's processes."""
        return self._process.pid

    def run(self, workload: Workload) -> Run:
        """Plays a workload. Raises DriverFailed."""
        assert self._process.stdin is not None
        print(json.dumps(workload.to_json()), file=self._process.stdin, flush=True)
        self.is_busy = True
        return Run.from_json(json.loads(self._answer()))

    def stop(self) -> None:
        """Ends the system, also in the middle of a run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self.is_busy:
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            self._process.wait()
            raise DriverFailed(f"{self.name} has ended: see {self._log}")
        self.is_busy = False
        return line
