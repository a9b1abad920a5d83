"""The measure of a session's round trip, in small: it runs, and says what it says it measures."""

from pathlib import Path

import pytest

from bench.session import measure


@pytest.mark.parametrize("busy", [False, True])
def test_a_small_measure_of_each_way(busy):
    result = measure(sequences=3, prompt_tokens=20, rounds=20, warm_up=2, busy=busy)
    assert set(result) == {"socket", "grpc"}
    for figures in result.values():
        assert 0 < figures["p10_ms"] <= figures["p50_ms"] <= figures["p99_ms"]
        assert figures["p50_ms"] <= figures["max_ms"]


def test_beside_the_kv_manager_of_another_tree():
    tree = Path(__file__).parents[2]
    result = measure(sequences=3, prompt_tokens=20, rounds=20, warm_up=2, busy=False, against=tree)
    assert set(result) == {"socket", "grpc", "against"}
