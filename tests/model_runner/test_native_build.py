"""Installing without a compiler: the build goes on, and the log says at start what computes instead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model_runner.loading import LoadedModel
from services import model_setup

ROOT = Path(__file__).parent.parent.parent


def test_a_build_without_a_compiler_succeeds_without_the_library(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    sources = Path("model_runner") / "native" / "src"
    shutil.copytree(ROOT / sources, tmp_path / sources)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "CC": "no-such-compiler", "CXX": "no-such-compiler", "OCTAVO_COMPILE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no-such-compiler" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_the_log_says_that_torch_computes_and_why(
    monkeypatch: pytest.MonkeyPatch, smollm2_in_torch: LoadedModel
) -> None:
    monkeypatch.setattr(model_setup.native, "library", lambda: None)
    monkeypatch.setattr(model_setup.native, "why_not", lambda: "the CPU kernels were not built")
    assert model_setup._describe_kernels(smollm2_in_torch) == "torch; the CPU kernels were not built"
