"""What bench.streaming reads off its clocks, and that a small run goes through."""

from __future__ import annotations

import pytest
import torch

from bench import streaming
from bench.sleeping import SleepingExecutor
from bench.streaming import FIRST_STEPS, Stopwatch, longest_gap
from model_runner.batch import BatchEntry


def entry(tokens: int) -> BatchEntry:
    return BatchEntry([1] * tokens, 0, [1], True)


def test_a_gap_counts_when_a_part_of_it_is_looked_at() -> None:
    arrivals = [[0.0, 1.0, 1.5, 4.0], [0.5, 0.75, 3.0]]
    assert longest_gap(arrivals, 0.0, 0.6) == pytest.approx(1000)
    assert longest_gap(arrivals, 1.1, 1.2) == pytest.approx(2250)
    assert longest_gap(arrivals, 3.5, 9.0) == pytest.approx(2500)
    assert longest_gap(arrivals, 5.0, 9.0) == 0


def test_the_stopwatch_takes_steps_in_which_all_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Stopwatch(SleepingExecutor(0.0, 8, token_id=1), streams=2)
    seconds = iter(range(100))
    monkeypatch.setattr(streaming.time, "monotonic", lambda: 0.5 * next(seconds))
    for _ in range(FIRST_STEPS + 2 + FIRST_STEPS):
        watch.execute([entry(1), entry(1)], [])
        watch.execute([entry(1), entry(5)], [])
        watch.execute([entry(1)], [])
    assert watch.take() == [500.0]
    assert watch.take() == []


def test_the_sleeping_model_always_draws_the_same_token() -> None:
    logits = SleepingExecutor(0.0, 8, token_id=1).execute([entry(1), BatchEntry([1], 0, [1], False), entry(2)], [])
    assert logits.shape == (2, 8)
    assert logits.argmax(dim=1).tolist() == [1, 1]
    assert logits.dtype == torch.float32


def test_a_small_run_goes_through(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--streams 2 --tokens 150 --rounds 1 --text-tokens 200 --step-ms 5"
    monkeypatch.setattr("sys.argv", ["bench.streaming", *arguments.split()])
    streaming.main()
    output = capsys.readouterr().out
    assert "cost of streaming to 2 clients: " in output
    assert output.count("of 200 tokens (OK, ") == 2
