"""How ways are timed: with a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

from bench.turns import Load, compare, quantile


class Clock:
    """A clock that stands still but for what ways take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def way(self, name: str, durations: Iterator[float], log: list[str]):
        def take(turn: int) -> None:
            log.append(f"{name}{turn}")
            self.now += next(durations)

        return take


def test_ways_take_turns_in_both_orders_and_the_first_one_does_not_count() -> None:
    clock, log = Clock(), []
    # A slow first turn, as of a cold cache, and then one fast turn of ten.
    ways = {
        "a": clock.way("a", chain([0.5], repeat(3.0)), log),
        "b": clock.way("b", chain([100.0], [2.0] * 4, [1.0], repeat(2.0)), log),
    }
    assert compare(ways, 0, clock) == {"a": 3.0, "b": 1.0}
    assert log[:6] == ["a0", "b0", "a1", "b1", "b2", "a2"]
    assert len(log) == 22


def test_the_fastest_one_in_twenty_may_be_luck() -> None:
    times = [float(each) for each in range(200, 0, -1)]
    assert quantile(times, 0.05) == 11


def test_what_others_did() -> None:
    assert str(Load(1.25, 0.0)) == "other processes used 1.2 cores meanwhile, other machines 0.0"
