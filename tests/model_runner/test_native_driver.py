"""The kernels of ARM under an emulator, where a cross compiler and QEMU are installed; see docs/cpu.md."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = Path(__file__).parent.parent.parent / "model_runner" / "native" / "src"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-pthread", "-static", f"-I{SOURCES}"]


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="no cross compiler, or no QEMU")
def test_on_arm(tmp_path: Path) -> None:
    driver = tmp_path / "driver"
    sources = [*SOURCES.glob("*.cpp"), Path(__file__).parent / "native_driver.cpp"]
    subprocess.run([COMPILER, *FLAGS, *sources, "-o", driver], check=True)
    done = subprocess.run([EMULATOR, driver], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "neon: right\nscalar: right\n")
