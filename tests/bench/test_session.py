"""The measure of a session's round trip, in small: it runs, and says what it says it measures."""

from bench.session import measure


def test_a_small_measure():
    result = measure(sequences=3, prompt_tokens=20, rounds=40, warm_up=2)
    assert result["sequences"] == 3
    assert 0 < result["p50_ms"] <= result["p99_ms"]
