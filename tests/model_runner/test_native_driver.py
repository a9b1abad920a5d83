"""The kernels of ARM under an emulator, where a cross compiler and QEMU are installed; see docs/cpu.md."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = Path(__file__).parent.parent.parent / "model_runner" / "native" / "src"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-pthread", "-static", f"-I{SOURCES}"]
DOT_PRODUCTS = "-march=armv8.2-a+dotprod"
"""Of one file; what is in the others runs on any ARM."""


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason="no cross compiler, or no QEMU")
def test_on_arm(tmp_path: Path) -> None:
    driver, own = tmp_path / "driver", SOURCES / "kernels_neondot.cpp"
    subprocess.run([COMPILER, *FLAGS, DOT_PRODUCTS, "-c", own, "-o", tmp_path / "neondot.o"], check=True)
    sources = [each for each in SOURCES.glob("*.cpp") if each != own]
    sources += [tmp_path / "neondot.o", Path(__file__).parent / "native_driver.cpp"]
    subprocess.run([COMPILER, *FLAGS, *sources, "-o", driver], check=True)
    for cpu, sets in {"max": ["neondot", "neon", "scalar"], "cortex-a57": ["neon", "scalar"]}.items():
        done = subprocess.run([EMULATOR, "-cpu", cpu, driver], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "".join(f"{each}: right\n" for each in sets)), cpu
