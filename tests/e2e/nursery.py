"""Runners that begin at once: a process loads every module that a runner needs, and forks one for each start.

Each runner is a process of its own, killed and ended like any other. Only the import of torch and of the rest, some
seconds on a small machine, is done once for all. Linux only.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.kv_support import clean_environment


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )

    def start(self, log: Path, arguments: list[str], env: dict[str, str]) -> Forked:
        """Begins `octavo ARGUMENTS`, whose output goes to a file. env: what its environment has besides."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(log), arguments, env]), file=self._process.stdin, flush=True)
        return Forked(int(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process; what it has forked goes on."""
        self._process.communicate()


class Forked:
    """A forked process, with as much of Popen as the tests use. Its parent takes its exit code, which is not told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 when it has ended."""
        return 0 if select.select([self._handle], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """Returns 0 when it has ended. Raises subprocess.TimeoutExpired."""
        if not select.select([self._handle], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return 0

    def send_signal(self, number: int) -> None:
        """To this process, if it has not ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)


@contextmanager
def nursery() -> Iterator[Nursery | None]:
    """A nursery that loads while others work; None where there can't be one, and each start takes its time."""
    if sys.platform != "linux":
        yield None
        return
    made = Nursery()
    try:
        yield made
    finally:
        made.close()


def _serve() -> None:
    """Forks a runner for each line, and says its number."""
    from services.cli import app
    from services.supervisor import die_with_parent

    _load()
    # Nobody waits for the children: the system takes their exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    prepare = die_with_parent()
    for line in sys.stdin:
        log, arguments, env = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if prepare is not None:
            prepare()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(number, target)
        os.environ.update(env)
        app(arguments)


def _load() -> None:
    """Imports what a runner imports. Nothing here may start a thread."""
    for module in ("gguf", "tokenizers", "torch", "services.runner_process"):
        importlib.import_module(module)


if __name__ == "__main__":
    _serve()
