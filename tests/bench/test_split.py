"""The measure of what the split costs, in small: sides run by turns, and it says what it says it measures."""

from __future__ import annotations

import threading

import pytest

from bench.split import QUICK, Case, measure
from bench.split_turns import Turns


def test_sides_run_by_turns():
    turns = Turns("abba", steps=2)
    ran: list[str] = []

    def run(side: str) -> None:
        for _ in range(5):
            turns.step(side)
            if turns.is_on(side):
                ran.append(side)

    threads = [threading.Thread(target=run, args=(side,)) for side in "ab"]
    for thread in threads:
        thread.start()
    turns.wait()
    for thread in threads:
        thread.join()
    assert "".join(ran) == "aabbbbaa"
    assert [turns.meters[side].steps for side in "ab"] == [4, 4]
    for meter in turns.meters.values():
        assert len(meter.cycles) == 4
        assert 0 < sum(meter.cycles) <= meter.wall


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_small_measure(sleeps: bool):
    result = measure(Case("x", 3, sleeps), QUICK)
    assert result["ratio_x"] > 0
    assert 0 <= result["waited_share_x"] <= 1
    for side in ("in_process", "sidecar"):
        assert 0 < result[f"engine_cpu_x_{side}_ms"] <= result[f"process_cpu_x_{side}_ms"]
        assert 0 < result[f"books_p50_x_{side}_ms"] <= result[f"books_p99_x_{side}_ms"]
