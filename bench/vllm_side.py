"""bench.vllm_books in a process of its own, run by the interpreter of vLLM's environment, as a side of a comparison."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from bench.rounds import Figures, Sizes

REPOSITORY = Path(__file__).parents[1]


class Skipped(Exception):
    """vLLM cannot be measured here; says why."""


class VllmSide:
    """The process; ends with close(). Raises Skipped when it cannot be had."""

    def __init__(self, venv: Path | None, sizes: Sizes) -> None:
        if venv is None:
            raise Skipped("no --vllm-venv was given")
        python = venv / "bin" / "python"
        if not python.exists():
            raise Skipped(f"there is no {python}")
        self._process = subprocess.Popen(
            [python, "-m", "bench.vllm_books", json.dumps(asdict(sizes))],
            cwd=REPOSITORY,
            env={**os.environ, "VLLM_CONFIGURE_LOGGING": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if not (greeting := self._read()):
            raise Skipped(f"vLLM's block manager does not start under {python}: see its message above")
        self.versions: dict[str, str] = json.loads(greeting)

    def round(self, case: str) -> Figures:
        """The next round of a case. Raises RuntimeError when vLLM's process has ended."""
        assert self._process.stdin is not None
        print(case, file=self._process.stdin, flush=True)
        if not (answer := self._read()):
            raise RuntimeError(f"vLLM's process ended in the case {case!r}: see its message above")
        figures: Figures = json.loads(answer)
        return figures

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()
