"""The histograms of cached content, against times that a test sets itself."""

from __future__ import annotations

from bisect import bisect_left

import pytest

from kvmanager.pool import Pool
from kvmanager.residency import BOUNDS, REMEMBERED, Durations, Residency
from kvmanager.runs import Run
from kvmanager.types import Append, EvictionKind, IndexKind, PoolSpec


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def bucket(seconds: float) -> int:
    return bisect_left(BOUNDS, seconds)


def shown(durations: Durations) -> tuple[dict[int, int], float]:
    """Counts by bucket, without empty ones, and the sum."""
    return {place: count for place, count in enumerate(durations.counts) if count}, durations.total


def use(pool: Pool, tokens: range) -> None:
    """A prompt that is computed, and ends at once."""
    pool.allocate("x", tokens)
    pool.free([Append("x", (), len(tokens))])


# So small a pool remembers every block.
@pytest.mark.parametrize("eviction", list(EvictionKind))
@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
def test_a_life_is_told_by_the_clock(index: IndexKind, eviction: EvictionKind) -> None:
    clock = Clock()
    pool = Pool(PoolSpec(5, 4, index=index, eviction=eviction), clock)
    residency = pool.residency
    use(pool, range(8))  # two blocks, at 100
    clock.now = 107
    # Hit again, both of them, 7 seconds after they were let go; held for 13 seconds, which are no gap.
    pool.allocate("x", range(9))
    clock.now = 120
    pool.free([Append("x", (), 8)])
    assert shown(residency.reuse_gap) == ({bucket(7): 2}, 14)
    assert shown(residency.lifetime) == ({}, 0)
    clock.now = 160
    # Four blocks of another prompt: both go, 60 seconds after their birth and 40 after their last use.
    use(pool, range(50, 66))
    assert shown(residency.lifetime) == ({bucket(60): 2}, 120)
    assert shown(residency.idle) == ({bucket(40): 2}, 80)
    assert shown(residency.missed) == ({}, 0)
    clock.now = 161
    # The first prompt comes again, a second after it was given up.
    use(pool, range(8))
    assert shown(residency.missed) == ({bucket(1): 2}, 2)
    # What is computed for a second time was missed once.
    assert pool.totals.evicted_blocks == 4
    assert sum(residency.lifetime.counts) == 4
    assert pool.check().ok


def test_content_that_is_taken_back_is_no_eviction() -> None:
    clock = Clock()
    pool = Pool(PoolSpec(5, 4), clock)
    use(pool, range(16))
    pool.remove_prefix(range(8))
    use(pool, range(16))
    pool.reset_cache()
    use(pool, range(16))
    residency = pool.residency
    for histogram in (residency.lifetime, residency.idle, residency.missed):
        assert shown(histogram) == ({}, 0)


@pytest.mark.parametrize("eviction", list(EvictionKind))
def test_a_chain_that_grew_keeps_the_sum_of_its_lives(eviction: EvictionKind) -> None:
    clock = Clock()
    pool = Pool(PoolSpec(6, 4, eviction=eviction), clock)
    use(pool, range(4))  # one block at 100
    clock.now = 130
    use(pool, range(16))  # three more behind it
    clock.now = 140
    use(pool, range(17))  # all four again
    clock.now = 150
    use(pool, range(100, 120))
    residency = pool.residency
    assert residency.lifetime.total == pytest.approx(50 + 3 * 20)
    assert shown(residency.idle) == ({bucket(10): 4}, 40)
    assert shown(residency.reuse_gap) == ({bucket(30): 1, bucket(10): 4}, 70)


def test_a_bound_belongs_to_its_bucket() -> None:
    durations = Durations()
    for seconds in (0.0, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1], BOUNDS[-1] + 1):
        durations.observe(seconds, 3)
    assert durations.counts == [6, 3, *[0] * (len(BOUNDS) - 3), 3, 3]


def test_what_is_missed_in_a_large_pool_is_estimated_from_few_names() -> None:
    residency = Residency(1_600)
    assert residency.sampled == 100
    for number in range(100):
        names = [(number * 3_000 + each).to_bytes(4, "big") for each in range(3_000)]
        # The end of a chain goes first.
        for start in range(2_950, -1, -50):
            residency.evicted(Run(list(range(50)), start), names[start : start + 50][::-1])
        residency.stored(Run(list(range(3_000)), 0), names)
        # A name that came back is not missed a second time.
        residency.stored(Run(list(range(3_000)), 0), names)
    assert sum(residency.lifetime.counts) == 300_000
    # 3,000 names in expectation; the gaps between them are uniform, so that four standard deviations are 4 %.
    assert sum(residency.missed.counts) == pytest.approx(300_000, rel=0.05)


def test_no_more_names_are_remembered_than_was_said() -> None:
    residency = Residency(10)
    names = [number.to_bytes(4, "big") for number in range(1000)]
    residency.evicted(Run(list(range(1000)), 0), names[::-1])
    residency.stored(Run(list(range(1000)), 0), names)
    assert sum(residency.missed.counts) == REMEMBERED


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("step", [1, REMEMBERED - 1, REMEMBERED, 500])
def test_a_chain_comes_back_in_parts_of_any_length(first: int, step: int) -> None:
    residency = Residency(10)
    names = [number.to_bytes(4, "big") for number in range(1000)]
    residency.evicted(Run(list(range(1000)), first), names[::-1])
    # Other content at the same places of its chain was not missed.
    residency.stored(Run(list(range(1000)), first), [name[::-1] + b"other" for name in names])
    assert sum(residency.missed.counts) == 0
    for start in range(0, 1000, step):
        part = names[start : start + step]
        residency.stored(Run(list(range(len(part))), first + start), part)
    assert sum(residency.missed.counts) == REMEMBERED
