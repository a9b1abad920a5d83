"""The window of recent lookups, with the numbers of vLLM's own test, and what a pool lets into it."""

import random
from collections import deque

import pytest

from kvmanager import Pool
from kvmanager.errors import PoolShort
from kvmanager.hit_window import WINDOW, HitWindow
from kvmanager.types import Append, IndexKind, PoolSpec, RecentLookups


def test_the_rate_follows_the_newest_requests():
    window = HitWindow(5)
    rates = []
    for requests, queries, hits in [(1, 20, 9), (4, 80, 16), (1, 10, 2), (11, 20, 10), (22, 40, 30)]:
        window.add(requests, queries, hits)
        rates.append(window.rate)
    assert rates == [0.45, 0.25, 0.2, 0.5, 0.75]


def test_nothing_asked_is_not_nothing_found():
    window = HitWindow(5)
    assert window.rate is None
    window.add(1, 20, 0)
    assert window.rate == 0.0


def test_empty_observations_change_nothing():
    window = HitWindow(2)
    window.add(0, 0, 0)
    assert window.sums() == RecentLookups(0, 0, 0)
    window.add(1, 20, 5)
    for _ in range(10):
        window.add(0, 0, 0)
    assert window.sums() == RecentLookups(1, 20, 5)


def test_sums_are_those_of_a_window_that_is_kept_up_to_date():
    """Against vLLM's way: add the newest, then drop the oldest while there are too many requests, never the newest."""
    rng = random.Random(44)
    for most in (1, 2, 7, 50):
        window, kept = HitWindow(most), deque()
        for _ in range(300):
            note = (rng.choice([0, 1, 1, 1, 3, 60]), rng.randrange(100), rng.randrange(100))
            window.add(*note)
            if note[0]:
                kept.append(note)
            while len(kept) > 1 and sum(each[0] for each in kept) > most:
                kept.popleft()
            expected = [sum(column) for column in zip(*kept, strict=True)] or [0, 0, 0]
            assert window.sums() == RecentLookups(*expected)


def test_a_pool_remembers_a_thousand_lookups():
    pool = Pool(PoolSpec(100, 4))
    for number in range(WINDOW + 10):
        # The first 10 ask for 1 token each, and nothing is found; the others hit 4 of 5.
        tokens = [7] if number < 10 else [1, 2, 3, 4, 5]
        pool.allocate("a", tokens)
        pool.free([Append("a", (), len(tokens))])
    assert pool.totals.queried_tokens == 10 + 5 * WINDOW
    assert pool.recent.sums() == RecentLookups(WINDOW, 5 * WINDOW, 4 * (WINDOW - 1))


def test_a_pool_notes_the_lookups_that_its_totals_count():
    pool = Pool(PoolSpec(4, 4))
    pool.allocate("a", [1] * 9)
    with pytest.raises(PoolShort):
        pool.allocate("b", [2])
    pool.free([Append("a", (), 9)])
    pool.allocate("a", [1] * 9, resumed=True)
    pool.free([Append("a", (), 9)])
    pool.allocate("c", [1] * 9, skip_cache_read=True)
    assert pool.recent.sums() == RecentLookups(1, 9, 0)
    assert (pool.totals.queried_tokens, pool.totals.hit_tokens) == (9, 0)


def test_a_pool_that_caches_nothing_looks_nothing_up():
    pool = Pool(PoolSpec(4, 4, index=IndexKind.NONE))
    pool.allocate("a", [1] * 9)
    assert pool.recent.sums() == RecentLookups(0, 0, 0)
    assert pool.totals.queried_tokens == 0
