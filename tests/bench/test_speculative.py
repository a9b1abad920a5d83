"""The measure of what guessing saves, in small: its figures follow from what it counts."""

from __future__ import annotations

import pytest

from bench.speculative import Plan, measure


def test_a_small_measure() -> None:
    """Two answers of 12 tokens at most. The measure itself sees that both engines give the same ones."""
    figures = measure(Plan(rounds=1, max_tokens=12, documents=2), speculative_tokens=4, ngram=3, streams=(1,))
    for task in ("summary", "quote"):
        name = f"{task}_1"
        assert figures[f"tokens_{name}"] == 24
        assert figures[f"tokens_per_step_without_{name}"] == 1.0
        drafted, acceptance = figures[f"drafted_per_token_{name}"], figures[f"acceptance_{name}"]
        # Of t tokens, a = acceptance x drafted came beside another one of their step.
        assert figures[f"tokens_per_step_{name}"] == pytest.approx(1 / (1 - acceptance * drafted))
        assert figures[f"speed_ratio_{name}"] > 0
        assert figures[f"cpu_ratio_{name}"] > 0
    assert figures["tokens_per_step_quote_1"] > 1.0
