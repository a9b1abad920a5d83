"""vllm-core.md 1a.6, 1b items 44 and 59, and the reports of section 2 about hit rates and usage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.hit_window import HitWindow
from services.kv_process import RunningKvManager
from tests.conformance.client import COMMON, Client, refusal
from tests.services.kv_support import scrape

NewPool = Callable[..., Client]


def test_44_hit_rate_window() -> None:
    """Directly on kvmanager: a pool's own window is of 1000 lookups, the reference's numbers are of 5."""
    window = HitWindow(5)
    rates: list[float | None] = [window.rate]
    for requests, queries, hits in [(1, 20, 9), (4, 80, 16), (1, 10, 2), (11, 20, 10), (22, 40, 30)]:
        window.add(requests, queries, hits)
        window.add(0, 0, 0)
        rates.append(window.rate)
    assert rates == [None, 0.45, 0.25, 18 / 90, 0.5, 0.75]


def test_44_hit_rate_of_late(new_pool: NewPool) -> None:
    pool = new_pool(11, 4)
    assert pool.get().recent_lookups == pb.RecentLookups()
    pool.cache("a", range(9))
    # One lookup that found nothing is a hit rate of 0; none at all is not.
    assert pool.get().recent_lookups == pb.RecentLookups(lookups=1, queried_tokens=9)
    for _ in range(1000):
        pool.allocate("b", [0, 1, 2, 3, 9])
        pool.free("b")
    # The window has forgotten the cold one, the totals have not.
    assert pool.get().recent_lookups == pb.RecentLookups(lookups=1000, queried_tokens=5000, hit_tokens=4000)
    assert (pool.get().totals.queried_tokens, pool.get().totals.hit_tokens) == (5009, 4000)


def test_1a6_who_counts(pool: Client) -> None:
    """Counted once at admission, in tokens; not who opted out of reads, nor who comes back after a preemption."""
    pool.cache("a", COMMON + [3] * 7)
    pool.cache("b", COMMON + [3] * 5)
    pool.cache("opted out", COMMON + [3] * 5, skip_cache_read=True)
    assert pool.cache("resumed", COMMON + [3] * 5, resumed=True).cached_tokens == 48
    pool.lookup(COMMON)
    totals = pool.get().totals
    # Differs: vLLM counts the resumed one in fields of its own, which it does not export.
    assert (totals.queried_tokens, totals.hit_tokens) == (55 + 53, 48)
    assert pool.get().recent_lookups == pb.RecentLookups(lookups=2, queried_tokens=108, hit_tokens=48)


def test_25780_a_query_that_is_retried_counts_once(new_pool: NewPool) -> None:
    """25780, PR 25787, 43736. An Allocate that is refused counts nothing; so the one that is admitted is the one."""
    pool = new_pool(4)
    pool.allocate("other", [7] * 32)
    before = pool.get().totals.queried_tokens
    for _ in range(10):
        assert refusal(lambda: pool.allocate("a", [8] * 32)).code == "RESOURCE_EXHAUSTED"
    assert pool.get().totals.queried_tokens == before
    pool.free("other")
    pool.allocate("a", [8] * 32)
    totals = pool.get().totals
    assert (totals.queried_tokens - before, totals.allocation_failures) == (32, 10)
    assert pool.get().recent_lookups.lookups == 2


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (pb.PREFIX_INDEX_HASH, [0, 32, 32, 48]),
        # Differs on purpose: the radix index hits to the token, by a copy of the block's beginning, so that only the
        # last token is computed again, as vLLM did before PR 11186. The block is its own: no hash goes wrong by it.
        (pb.PREFIX_INDEX_RADIX, [0, 47, 47, 48]),
    ],
)
def test_11186_a_prompt_that_is_cached_whole(new_pool: NewPool, index: int, expected: list[int]) -> None:
    pool = new_pool(11, prefix_index=index)
    tokens = list(range(64))
    found = [pool.cache("a", tokens[:48]).cached_tokens for _ in range(3)]
    assert [*found, pool.cache("b", tokens).cached_tokens] == expected
    assert pool.lookup([*tokens, 9]).cached_tokens == 64
    assert pool.index_size == 4


def test_57336_blocks_and_tokens(new_pool: NewPool) -> None:
    """PR 57336: 17-token prompts in blocks of 16 use 66.7 % of the blocks and 36.5 % of the room for tokens.

    Both numbers are met by 32 prompts in 96 blocks, half of which have one generated token.
    """
    pool = new_pool(97)
    for number in range(32):
        pool.prefill(f"s{number}", [number] * (17 + number % 2))
    occupancy = pool.get().occupancy
    assert (occupancy.held_blocks, occupancy.usable_blocks) == (64, 96)
    assert (occupancy.stored_tokens, occupancy.reserved_tokens) == (16 * 17 + 16 * 18, 64 * 16)
    assert round(occupancy.held_blocks / occupancy.usable_blocks, 3) == 0.667
    assert round(occupancy.stored_tokens / (occupancy.usable_blocks * 16), 3) == 0.365


def test_59_four_uses_have_three_gaps(kv_manager: RunningKvManager, new_pool: NewPool) -> None:
    """Differs: every block is counted, not a sample of them, so there is no rate that could be out of (0, 1]."""
    pool = new_pool()
    counted = []
    for use in range(4):
        pool.allocate(f"use{use}", COMMON)
        if use == 1:
            # A use while another holds the blocks ends no gap.
            pool.allocate("beside", COMMON)
            pool.free("beside")
        pool.free(f"use{use}", computed=48)
        counted.append(_counted(kv_manager, pool, "block_reuse_gap"))
    # 48 tokens are three blocks, of which a hit covers two: the last token is computed again.
    assert counted == [0, 2, 4, 6]
    assert _counted(kv_manager, pool, "block_lifetime") == 0
    pool.prefill("all", [9] * 160)
    assert _counted(kv_manager, pool, "block_lifetime") == _counted(kv_manager, pool, "block_idle_before_evict") == 3


def _counted(kv_manager: RunningKvManager, pool: Client, histogram: str) -> float:
    """How often a histogram of a pool was observed."""
    found = scrape(kv_manager.metrics_address)
    name = f"octavo_kv_{histogram}_seconds_count"
    return sum(
        value
        for (found_name, labels), value in found.items()
        if found_name == name and ("pool", pool.pool_id) in labels
    )
