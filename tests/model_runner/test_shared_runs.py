"""Which sequences of a step attend shared blocks together, by hand. A split of the context has 4 blocks of 64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")
SOURCES = Path(__file__).parent.parent.parent / "model_runner" / "native" / "src"

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

A, B, C = ([first + block for block in range(12)] for first in (100, 200, 300))
"""Three chains of 12 blocks, which have none in common."""

Sequence = tuple[list[int], int] | tuple[list[int], int, int]
"""A table, the length, and the tokens in the step, 1 unless it says so."""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("shared_runs") / "driver"
    sources = [SOURCES / "shared_runs.cpp", Path(__file__).parent / "shared_runs_driver.cpp"]
    subprocess.run([str(COMPILER), "-std=c++17", f"-I{SOURCES}", *sources, "-o", built], check=True)
    return built


def runs(driver: Path, step: list[Sequence], block_size: int = 64) -> list[tuple[int, ...]]:
    width = max(len(table) for table, *_ in step)
    words = [block_size, len(step), width]
    for table, length, *tokens in step:
        words += [tokens[0] if tokens else 1, length, *table, *[0] * (width - len(table))]
    done = subprocess.run([driver], input=" ".join(map(str, words)), capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ([(A, 700)], []),
        ([(A, 700), (B, 700)], []),
        ([(A[:1] + B, 700), (A, 700)], []),
        ([(A[:3] + B, 700), (A, 700)], []),
        ([(A[:4] + B, 700), (A, 700)], [(0, 2, 1)]),
        ([(A[:7] + B, 700), (A, 700)], [(0, 2, 1)]),
        ([(A[:8] + B, 700), (A[:8] + C, 530), (A, 700)], [(0, 3, 2)]),
        # A chain forked amid a block has that block twice: one is a copy.
        ([(A[:9], 570), ([*A[:8], 7], 570)], [(0, 2, 2)]),
        # The shorter one's tokens end it; block 0 behind them is padding.
        ([(A, 700), (A, 511)], [(0, 2, 1)]),
        ([(A, 700), (A, 255)], []),
        ([(A[:2], 100), (B[:2], 100)], []),
        ([(A, 512), (A, 512)], [(0, 2, 2)]),
        # A prompt has rows enough of its own, and ends a run.
        ([(A, 700), (A, 700, 5), (A, 700), (A, 700)], [(2, 4, 2)]),
        ([(B, 700), (A, 700), (A, 700), (C, 700), (C, 700)], [(1, 3, 2), (3, 5, 2)]),
        # Who shares more joins; who shares less does not, and begins no run with one that is taken.
        ([(A[:4] + B, 700), (A, 700), (A, 700)], [(0, 3, 1)]),
        ([(A, 700), (A, 700), (A[:4] + B, 700), (A[:4] + B, 700)], [(0, 2, 2), (2, 4, 2)]),
        ([(A, 700), (A, 700), (A[:4] + B, 700), (C, 700)], [(0, 2, 2)]),
    ],
)
def test_by_hand(driver: Path, step: list[Sequence], expected: list[tuple[int, ...]]) -> None:
    assert runs(driver, step) == expected


def test_blocks_larger_than_a_split(driver: Path) -> None:
    assert runs(driver, [([5, 6], 800), ([5, 7], 800)], 512) == [(0, 2, 2)]
    assert runs(driver, [([5, 6], 400), ([5, 7], 300)], 512) == [(0, 2, 1)]
