"""Figures from given times, ratios from given figures, and what is marked, kept and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.serve.figures import Figures, Results, figures_of, same_tokens
from bench.serve.player import Answer
from bench.serve.plot import plot, speedups
from bench.serve.report import PAIRS, TARGETS, Target, ratio, report
from bench.serve.system import CpuUse, Run
from bench.serve.systems import SYSTEMS

MACHINE = {"cpu": "one", "cores": "2"}


def figures(
    system: str, workload: str, number: int, rate: float, between: float = 10.0, others: float = 0.0
) -> Figures:
    return Figures(system, workload, number, 1, rate, 100.0, between, between, 1.0, 2.0, others, 0.5, {})


def results(*runs: Figures) -> Results:
    return Results(MACHINE, {}, list(runs))


def test_figures_of_two_answers() -> None:
    answers = (
        Answer(asked=1.0, times=(2.0, 2.5, 3.0), token_ids=(1, 2, 3)),
        Answer(asked=2.0, times=(5.0, 6.0), token_ids=(4, 5)),
    )
    run = Run(answers, CpuUse(6.0, 1.5, 0.1), {"useful_share": 0.9})
    found = figures_of("octavo", "A", 0, run, run)
    assert found.output_rate == 5 / (6.0 - 1.0)  # From the first request to the last token.
    assert found.ttft_ms == 2000  # Of 1 and 3 seconds.
    assert found.between_ms == 500  # Of 0.5, 0.5 and 1 seconds.
    assert found.between_p95_ms == 1000
    assert (found.answers, found.own_cores, found.extra) == (2, 1.5, {"useful_share": 0.9})
    assert found.same_tokens == 1


def test_tokens_count_as_the_same_up_to_the_first_that_differs() -> None:
    reference = [Answer(0.0, (), (1, 2, 3, 4)), Answer(0.0, (), (5, 6)), Answer(0.0, (), (7, 8))]
    answers = [Answer(0.0, (), (1, 2, 9, 4)), Answer(0.0, (), (5, 6))]  # A part of them was played.
    assert same_tokens(answers, reference) == 4 / 6


def test_a_ratio_is_taken_within_rounds() -> None:
    # The machine is three times as slow in round 1: medians over the rounds would say 1.0.
    found = results(
        figures("octavo", "A", 0, 90.0),
        figures("vllm", "A", 0, 60.0),
        figures("octavo", "A", 1, 30.0),
        figures("vllm", "A", 1, 20.0),
        figures("vllm", "A", 2, 900.0),
    )
    assert ratio(found, "octavo", "vllm", "A", "output_rate") == 1.5
    assert ratio(found, "octavo", "hf", "A", "output_rate") is None


def test_targets_say_which_way_is_better() -> None:
    rate, time = Target("A", "output_rate", "vllm", 1.3), Target("C", "between_ms", "vllm", 0.4)
    assert (rate.is_met(1.3), rate.is_met(1.2)) == (True, False)
    assert (time.is_met(0.4), time.is_met(0.5)) == (True, False)
    assert len({(each.workload, each.figure, each.peer) for each in TARGETS}) == len(TARGETS)


def test_the_report_has_figures_marks_and_targets() -> None:
    text = report(
        results(
            figures("octavo", "C", 0, 80.0, between=12.0),
            figures("vllm", "C", 0, 10.0, between=40.0, others=0.3),
        )
    )
    assert "| octavo | 1 | 80.0 | 100.0 | 12.0 | 12.0 | 50% | 0.00 | 1.00 | 1.00 | 1.00 |" in text
    assert "| vllm | 1 | 10.0* | 100.0* | 40.0* | 40.0* | 50% | 0.30 | 8.00 | 1.00 | 0.30 |" in text
    assert "| C, ms between tokens, octavo / vllm: at most 0.4 | 0.30 | met |" in text
    assert "octavo / hf" not in text


def test_forms_that_round_are_held_against_peers_that_round() -> None:
    text = report(
        results(
            figures("octavo-w8a8-kv16", "E", 0, 90.0),
            figures("vllm", "E", 0, 30.0),
            figures("vllm-bfloat16", "E", 0, 60.0),
        )
    )
    assert "| E, output tokens/s, octavo-w8a8-kv16 / vllm-bfloat16: at least 1.5 | 1.50 | met |" in text
    assert "octavo-w8a8-kv16 / vllm:" not in text
    assert {name for pairs in PAIRS.values() for pair in pairs for name in pair} <= SYSTEMS.keys()
    assert {each.peer for each in TARGETS} == PAIRS.keys()


def test_results_are_kept_and_only_for_one_machine(tmp_path: Path) -> None:
    path = tmp_path / "serve.json"
    kept = results(figures("octavo", "A", 0, 90.0))
    kept.save(path)
    assert Results.load(path, MACHINE) == kept
    assert kept.has("octavo", "A", 0)
    assert not kept.has("octavo", "A", 1)
    with pytest.raises(ValueError, match="another machine"):
        Results.load(path, {**MACHINE, "cores": "3"})


def test_the_picture_has_the_peers_ratios(tmp_path: Path) -> None:
    found = results(
        figures("octavo", "A", 0, 90.0),
        figures("octavo-float32", "A", 0, 80.0),
        figures("vllm", "A", 0, 60.0),
        figures("octavo", "B", 0, 50.0),
        figures("octavo-w8a8-kv16", "B", 0, 70.0),
        figures("vllm-bfloat16", "B", 0, 35.0),
        figures("hf-16", "B", 0, 10.0),
    )
    assert speedups(found) == {
        "octavo / vllm": {"A": 1.5},
        "octavo-w8a8-kv16 / vllm-bfloat16": {"B": 2.0},
        "octavo / hf-16": {"B": 5.0},
    }
    plot(found, tmp_path / "serve.png")
    assert (tmp_path / "serve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_a_peer_there_is_no_picture(tmp_path: Path) -> None:
    plot(results(figures("octavo", "A", 0, 90.0)), tmp_path / "serve.png")
    assert not (tmp_path / "serve.png").exists()
