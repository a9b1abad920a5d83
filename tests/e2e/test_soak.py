"""`octavo soak` on real processes, for two minutes or for a moment: faults cost no token, no block and no stream."""

from __future__ import annotations

import os
import re

import pytest

from tests.e2e.stack import run_octavo

MOST_SECONDS = 900
"""Two minutes of load, and what a busy machine needs for the start and the proof."""
GOOD = "all answers are right, the books are right, nothing is held"


@pytest.mark.skipif("'not soak' not in config.option.markexpr", reason="the two minutes prove as much")
def test_a_moment():
    run = run_octavo("soak", "--minutes", "0.2", "--seed", "1", timeout=MOST_SECONDS, afresh=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert GOOD in run.stdout
    assert "octavo soak --minutes 0.2 --seed 1\n" in run.stdout


@pytest.mark.soak
def test_two_minutes():
    # At a desk each run is another one; its output begins with the seed that repeats it.
    seed = ("--seed", "1") if os.environ.get("CI") else ()
    run = run_octavo("soak", "--minutes", "2", *seed, timeout=MOST_SECONDS, afresh=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert GOOD in run.stdout
    assert re.match(r"octavo soak --minutes 2 --seed \d+\n", run.stdout)


def test_an_impossible_length():
    run = run_octavo("soak", "--minutes", "0")
    assert run.returncode == 2
    assert "--minutes" in run.stderr
