"""The kernel bench runs whole in small, says what it says it does, and takes the best of turns that alternate."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from bench import kernels
from model_runner import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels are not built here")


def test_the_best_turn_counts_and_ways_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([5.0, 1.0, 3.0, 4.0, 2.0, 6.0])
    now, turns = 0.0, []

    def way(name: str) -> None:
        nonlocal now
        turns.append(name)
        if len(turns) > 2:
            now += next(took)

    monkeypatch.setattr(kernels, "perf_counter", lambda: now)
    best = kernels.best({"one": lambda: way("one"), "other": lambda: way("other")}, 3)
    assert turns == ["one", "other"] * 4  # The first two warm up.
    assert best == {"one": 2.0, "other": 1.0}


def test_everything_is_measured_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "READ_FLOATS", 1 << 20)
    monkeypatch.setattr(kernels, "PEAK_TURNS", 20_000)
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", ["kernels", "--threads", "1", "--turns", "1", "--rows", "1", "--forms", "auto"])
    try:
        kernels.main()
    finally:
        torch.set_num_threads(threads)
        native.need_library().set_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    matrices = [line.split()[1] for line in lines if re.match(r" +1 ", line)]
    assert matrices == ["qkv", "gate_up", "down"]
    assert len([line for line in lines if line.startswith("attention ") and "paged / contiguous" in line]) == 2
    assert len([line for line in lines if re.match(r"step of .*auto [\d.]+ ms, torch [\d.]+ ms", line)]) == 5
