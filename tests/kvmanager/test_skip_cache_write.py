"""Sequences that leave nothing in the cache: what they find they share, and what they compute nobody ever finds."""

import pytest

from kvmanager.errors import InvalidArgument
from kvmanager.runner_pool import RunnerPool
from kvmanager.types import Append, IndexKind, Retention
from tests.kvmanager.held import assert_equal_books, holdings_of, known_of, of_base
from tests.kvmanager.pools import COMMON, cache, end, pool_of, prefill, right

BOTH = pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])


@BOTH
def test_neither_prompt_nor_output_can_be_found(index):
    pool = pool_of(index=index)
    prefill(pool, "a", COMMON, skip_cache_write=True)
    pool.append([Append("a", [7] * 17, 0)])
    pool.append([Append("a", (), 65)])
    assert pool.lookup([*COMMON, *[7] * 17]).cached_tokens == 0
    end(pool, "a")
    occupancy = pool.occupancy()
    assert (occupancy.free_blocks, occupancy.cached_blocks, occupancy.held_blocks) == (10, 0, 0)
    assert pool.events.since(1) == []
    assert right(pool)


@BOTH
def test_what_it_found_is_shared_and_stays(index):
    pool = pool_of(index=index)
    cache(pool, COMMON[:32])
    found = pool.lookup([*COMMON, 9]).block_ids
    assert prefill(pool, "a", [*COMMON, 9], skip_cache_write=True).cached_tokens == 32
    assert tuple(pool.sequence("a").blocks[:2]) == found
    end(pool, "a")
    assert pool.lookup([*COMMON, 9]).cached_tokens == 32
    assert (pool.totals.queried_tokens, pool.totals.hit_tokens) == (32 + 49, 32)
    assert right(pool)


def test_part_of_a_block_can_be_found_and_the_rest_is_not():
    pool = pool_of(index=IndexKind.RADIX)
    cache(pool, COMMON)
    prompt = [*COMMON[:40], *[9] * 20]
    assert prefill(pool, "a", prompt, skip_cache_write=True).cached_tokens == 40
    end(pool, "a")
    assert pool.lookup(prompt).cached_tokens == 40
    assert right(pool)


def test_equal_prompts_of_a_step_share_only_what_is_to_be_found():
    pool = pool_of()
    quiet = pool.allocate("quiet", COMMON, promised_tokens=48, skip_cache_write=True)
    loud = pool.allocate("loud", COMMON, promised_tokens=48)
    reader = pool.allocate("reader", [*COMMON, 5], promised_tokens=1, skip_cache_write=True)
    assert (quiet.cached_tokens, loud.cached_tokens, reader.cached_tokens) == (0, 0, 48)
    assert not set(quiet.block_ids) & set(loud.block_ids)
    pool.append([Append("quiet", (), 48), Append("loud", (), 48), Append("reader", (), 49)])
    end(pool, "loud", "quiet")
    assert pool.lookup([*COMMON, 5]).cached_tokens == 48
    assert right(pool)


def test_a_reader_of_a_step_that_failed_publishes_nothing():
    pool = pool_of()
    pool.allocate("loud", COMMON, promised_tokens=48)
    pool.allocate("reader", [*COMMON, 5], promised_tokens=1, skip_cache_write=True)
    pool.free([Append("loud"), Append("reader")])
    assert pool.lookup([*COMMON, 5]).cached_tokens == 0
    assert pool.occupancy().free_blocks == 10
    assert right(pool)


def test_children_leave_nothing_either():
    pool = pool_of()
    prefill(pool, "a", COMMON[:20], skip_cache_write=True)
    pool.fork("a", ["b"])
    pool.append([Append("a", [7] * 30), Append("b", [8] * 30)])
    pool.append([Append("a", (), 50), Append("b", (), 50)])
    end(pool, "a", "b")
    assert pool.occupancy().free_blocks == 10
    assert right(pool)


def test_a_rewind_into_what_was_found_publishes_nothing_in_its_place():
    pool = pool_of()
    cache(pool, COMMON)
    prefill(pool, "a", [*COMMON, 9], skip_cache_write=True)
    pool.truncate("a", 20)
    pool.append([Append("a", [9] * 12)])
    pool.append([Append("a", (), 32)])
    end(pool, "a")
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    assert pool.lookup([*COMMON[:20], *[9] * 13]).cached_tokens == 16
    assert right(pool)


@BOTH
def test_a_found_block_that_a_rewind_ends_in_keeps_its_name_until_it_is_written(index):
    pool = pool_of(index=index)
    cache(pool, COMMON[:32])
    prefill(pool, "a", [*COMMON[:32], 9], skip_cache_write=True)
    name = pool.block_table("a")[1][1].block_hash
    pool.truncate("a", 20)
    assert pool.block_table("a")[1][1].block_hash == name != b""
    assert pool.lookup([*COMMON[:32], 9]).block_ids == (1, 2)
    pool.append([Append("a", [9] * 12)])
    assert pool.block_table("a")[1][1].block_hash == b""
    pool.append([Append("a", (), 32)])
    end(pool, "a")
    assert pool.lookup([*COMMON[:20], *[9] * 13]).cached_tokens == 16
    assert (pool.occupancy().free_blocks, pool.occupancy().cached_blocks) == (9, 1)
    assert right(pool)


def test_a_retention_makes_no_sense():
    pool = pool_of()
    for retention in (Retention(priority=1), Retention(pin_seconds=0.5)):
        with pytest.raises(InvalidArgument, match="nothing to keep"):
            pool.allocate("a", COMMON, retention=retention, skip_cache_write=True)
    assert pool.live == {}


@BOTH
def test_restored_books_publish_what_was_found_and_nothing_else(index):
    pool = RunnerPool(pool_of(index=index).spec)
    cache(pool, COMMON[:32])
    prefill(pool, "a", [*COMMON, *range(20, 37)], skip_cache_write=True)
    pool.fork("a", ["b"])
    other = RunnerPool(pool.spec)
    other.restore(holdings_of(pool, known_of(of_base(COMMON), pool)), caller=9)
    assert_equal_books(pool, other)
    other.append([Append("a", [1] * 20), Append("b", [2] * 20)], caller=9)
    other.append([Append("a", (), 80), Append("b", (), 80)], caller=9)
    other.free([Append("a"), Append("b")], caller=9)
    assert other.lookup([*COMMON, *range(20, 37)]).cached_tokens == 32
    assert (other.occupancy().free_blocks, other.occupancy().cached_blocks) == (8, 2)
    assert right(other)
