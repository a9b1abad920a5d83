"""Processes of `octavo` that begin at once: one that has loaded what a service needs forks one for each start.

Each is a process of its own, killed and ended like any other; its environment is set before it reads a setting. Only
the import of torch and of the rest, some seconds of CPU time, is done once for all, and nothing of it is taken apart at
an end, which takes most of a second. Where memory, command lines or environments of processes are looked at, or what
libraries read when they are loaded, a process of its own is due.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.services.kv_support import clean_environment

REAP_SECONDS = 10.0
"""After the end of a process, until its exit code is there."""


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        self._codes = Path(tempfile.mkdtemp(prefix="octavo-nursery-"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.nursery", str(self._codes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environment(),
            text=True,
        )

    def start(self, arguments: list[str], env: dict[str, str], stdout: Path, stderr: Path) -> Forked:
        """Begins `octavo ARGUMENTS`, whose output goes to files. env: all of its environment."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = [arguments, env, str(stdout), str(stderr), os.getcwd()]
        print(json.dumps(line), file=self._process.stdin, flush=True)
        pid = int(self._process.stdout.readline())
        return Forked(pid, self._codes / str(pid))

    def close(self) -> None:
        """Ends the process, and with it what it has forked."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._codes)


class Forked:
    """A forked process, with as much of Popen as the tests use."""

    def __init__(self, pid: int, code: Path) -> None:
        """code: the file in which its parent writes its exit code."""
        self.pid = pid
        self._code = code
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self._handle = -1

    def poll(self) -> int | None:
        """The exit code when it has ended; that of a signal is negative."""
        return self._exit_code() if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code when it has ended. Raises subprocess.TimeoutExpired."""
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0)
        return self._exit_code()

    def send_signal(self, number: int) -> None:
        """To this process, if it has not ended."""
        if not self._has_ended(0):
            signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """kill -9."""
        self.send_signal(signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        return self._handle < 0 or bool(select.select([self._handle], [], [], timeout)[0])

    def _exit_code(self) -> int:
        deadline = time.monotonic() + REAP_SECONDS
        while not self._code.exists():
            assert time.monotonic() < deadline, f"nobody has told the exit code of process {self.pid}"
            time.sleep(0.01)
        return int(self._code.read_text())


@cache
def the_nursery() -> Nursery | None:
    """This test run's; None where there can't be one, and each start takes its time. It loads while others work."""
    return Nursery() if sys.platform == "linux" else None


def close_the_nursery() -> None:
    """At the end of the run, if there was one."""
    if the_nursery.cache_info().currsize and (nursery := the_nursery()) is not None:
        nursery.close()


def _serve(codes: Path) -> None:
    """Forks a process for each line, says its number, and writes the exit codes of those that have ended."""
    inherited = set(os.environ)
    from services.cli import app
    from services.supervisor import die_with_parent

    _load()
    set_by_imports = {name: value for name, value in os.environ.items() if name not in inherited}
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap(codes))
    prepare = die_with_parent()
    for line in sys.stdin:
        arguments, env, stdout, stderr, directory = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if prepare is not None:
            prepare()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(set_by_imports | env)
        outputs = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for path in (stdout, stderr)]
        for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), *zip(outputs, (1, 2), strict=True)):
            os.dup2(number, target)
        _run(app, arguments)


def _run(app: Callable[[list[str]], object], arguments: list[str]) -> None:
    """Ends as an interpreter does, threads, exit functions and output, but leaves memory to the system."""
    try:
        app(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code or 0)


def _reap(codes: Path) -> None:
    """Writes the exit codes of all that have ended, each whole."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        unfinished = codes / f"{pid}.new"
        unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
        unfinished.rename(codes / str(pid))


def _load() -> None:
    """Imports what services import. Nothing here may start a thread."""
    for module in ("gguf", "tokenizers", "torch", "services.kv_process", "services.runner_process"):
        importlib.import_module(module)
    # No child searches or copies all this at each of its collections.
    gc.freeze()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
