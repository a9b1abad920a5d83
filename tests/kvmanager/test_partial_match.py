"""Hits that end inside a block: how long they are, what is copied, and when no copy is due."""

import random

import pytest

from kvmanager.types import Append, BlockCopy, CacheScope, ContentSpan, Hit, IndexKind
from tests.kvmanager.pools import COMMON, cache, end, pool_of, prefill, right

RADIX = IndexKind.RADIX


@pytest.mark.parametrize(("index", "tokens"), [(IndexKind.RADIX, 47), (IndexKind.HASH, 32), (IndexKind.NONE, 0)])
def test_all_but_the_last_token_of_a_cached_prompt_is_a_hit(index, tokens):
    pool = pool_of(index=index)
    cache(pool, COMMON)
    assert pool.lookup(COMMON).cached_tokens == tokens
    allocation = pool.allocate("b", COMMON)
    assert allocation.cached_tokens == tokens
    assert pool.sequence("b").computed == tokens
    assert right(pool)


def test_the_tokens_inside_a_block_are_copied_to_the_sequences_own():
    pool = pool_of(index=RADIX)
    cache(pool, COMMON)
    allocation = pool.allocate("b", COMMON[:40] + [7] * 3)
    assert allocation.block_ids == (1, 2, 4)
    assert allocation.cached_tokens == 40
    assert allocation.copies == (BlockCopy(3, 4, 8),)
    assert pool.totals.copies == 1
    assert pool.totals.hit_tokens == 40
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    assert right(pool)


def test_a_hit_inside_the_first_block():
    pool = pool_of(index=RADIX)
    cache(pool, [1] * 16)
    assert pool.lookup([1] * 5 + [2] * 20) == Hit((), 5, 1)
    assert pool.allocate("b", [1] * 5 + [2] * 20).copies == (BlockCopy(1, 2, 5),)


def test_nothing_in_common_is_no_hit():
    pool = pool_of(index=RADIX)
    cache(pool, [1] * 16)
    assert pool.lookup([2] * 20) == Hit((), 0, 0)
    assert pool.lookup([1]) == Hit((), 0, 0)
    assert pool.lookup([1, 1]) == Hit((), 1, 1)


def test_no_copy_is_due_when_the_block_itself_was_given_up_for_the_sequence():
    pool = pool_of(num_blocks=2, index=RADIX)
    cache(pool, [1] * 16)
    allocation = pool.allocate("b", [1] * 10 + [2] * 6)
    assert allocation.block_ids == (1,)
    assert allocation.cached_tokens == 10
    assert allocation.copies == ()
    assert pool.totals.copies == 0
    assert pool.occupancy().stored_tokens == 10
    assert pool.lookup([1] * 17).cached_tokens == 0
    pool.append([Append("b", (), 16)])
    assert pool.lookup([1] * 10 + [2] * 7).cached_tokens == 16
    assert right(pool)


def test_a_source_that_is_given_up_for_a_later_block_is_copied_first():
    """The order of copies is the promise: the source is written only after the answer."""
    pool = pool_of(num_blocks=4, index=RADIX)
    cache(pool, [1] * 16)
    pool.allocate("other", [9])
    allocation = pool.allocate("b", [1] * 10 + [2] * 10)
    assert set(allocation.block_ids) == {1, 3}
    source_first = allocation.block_ids[0] == 1
    assert allocation.copies == (() if source_first else (BlockCopy(1, 3, 10),))
    assert allocation.cached_tokens == 10
    assert right(pool)


def test_a_block_of_a_running_sequence_is_a_source_too():
    pool = pool_of(index=RADIX)
    prefill(pool, "a", [1] * 20)
    allocation = pool.allocate("b", [1] * 10 + [2] * 3)
    assert (allocation.cached_tokens, allocation.copies) == (10, (BlockCopy(1, 3, 10),))
    assert pool.block_pool.counts[1] == 1


def test_a_tail_that_is_not_full_is_no_source():
    pool = pool_of(index=RADIX)
    prefill(pool, "a", [1] * 16 + [2] * 15)
    assert pool.lookup([1] * 16 + [2] * 16).cached_tokens == 16


def test_the_longest_of_a_thousand_children_is_picked():
    pool = pool_of(num_blocks=1100, block_size=16, index=RADIX)
    draw = random.Random(1)
    tails = [[draw.randint(0, 1) for _ in range(16)] for _ in range(1000)]
    for tail in tails:
        cache(pool, [1] * 16 + tail)
    for _ in range(200):
        asked = [draw.randint(0, 1) for _ in range(16)]
        common = [next((at for at in range(16) if tail[at] != asked[at]), 16) for tail in tails]
        hit = pool.lookup([1] * 16 + asked)
        assert hit.cached_tokens == 16 + min(15, max(common))
    assert right(pool)


def test_tokens_are_compared_whole_and_not_by_their_bytes():
    pool = pool_of(block_size=4, index=RADIX)
    cache(pool, [0x0102, 0x01020304, 5, 6])
    assert pool.lookup([0x0103, 5, 5, 5, 5]).cached_tokens == 0
    assert pool.lookup([0x0102, 0x01020305, 5, 5, 5]).cached_tokens == 1
    assert pool.lookup([0x0102, 0x02020304, 5, 5, 5]).cached_tokens == 1


@pytest.mark.parametrize(
    ("scope", "spans"),
    [
        (CacheScope("x", "1"), ()),
        (CacheScope(salt="s"), ()),
        (CacheScope(), (ContentSpan("cat", 2, 4),)),
        (CacheScope(), (ContentSpan("dog", 0, 16),)),
    ],
)
def test_a_partial_hit_is_of_the_same_adapter_salt_and_content(scope, spans):
    pool = pool_of(index=RADIX)
    cache(pool, [1] * 32)
    assert pool.lookup([1] * 20, scope, spans).cached_tokens == 0
    cache(pool, [1] * 32, scope=scope, spans=spans)
    assert pool.lookup([1] * 20, scope, spans).cached_tokens == 19
    assert pool.lookup([1] * 20).cached_tokens == 19
    assert right(pool)


def test_a_partial_hit_holds_nothing_and_publishes_nothing():
    pool = pool_of(index=RADIX)
    cache(pool, [1] * 16)
    before = pool.events.last_number
    pool.allocate("b", [1] * 10 + [2] * 3)
    assert pool.block_pool.counts[1] == 0
    assert pool.events.last_number == before
    end(pool, "b")
    assert pool.lookup([1] * 10 + [2] * 3).cached_tokens == 10


def test_forks_copy_a_partial_hit_like_any_data():
    pool = pool_of(index=RADIX)
    cache(pool, [1] * 16)
    pool.allocate("b", [1] * 10 + [2] * 3)
    pool.fork("b", ["c"])
    grants = pool.append([Append("b", [5], 10), Append("c", [6], 10)])
    assert [grant.copies for grant in grants] == [(BlockCopy(2, 3, 10),)]
    assert right(pool)
