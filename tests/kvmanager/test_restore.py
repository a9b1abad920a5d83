"""Books made anew from what a runner holds: equal to those that were lost, or refused whole."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from kvmanager.errors import InvalidArgument
from kvmanager.holdings import HeldCache, HeldSequence, Holdings
from kvmanager.runner_pool import RunnerPool
from kvmanager.types import (
    BASE_SCOPE,
    Append,
    CacheScope,
    EvictionKind,
    HashAlgorithm,
    IndexKind,
    Occupancy,
    PoolSpec,
    Retention,
)
from tests.kvmanager.held import assert_equal_books, holdings_of, known_of, of_base
from tests.kvmanager.pools import FakeClock, cache, columns, end, prefill, right
from tests.kvmanager.test_runner_pool import news

SIZE = 4
SPEC = PoolSpec(17, SIZE, eviction=EvictionKind.LRU)
SALTED = CacheScope(salt="s")


def ids(numbers) -> array[int]:
    return array("I", numbers)


def busy_pool(spec: PoolSpec) -> RunnerPool:
    """Shared prefixes, forks with a partial tail, copies of equal content, two tenants, a lease, cached branches."""
    pool = RunnerPool(spec)
    prefill(pool, "a", [*range(8), 50])
    prefill(pool, "b", [*range(8), 60, 61])
    pool.fork("b", ["b1", "b2"])
    prefill(pool, "twin", range(8), skip_cache_read=True)
    if spec.hash_algorithm is HashAlgorithm.SHA256:
        prefill(pool, "salted", range(5), scope=SALTED)
    for last in (70, 71):
        cache(pool, [*range(4), *[last] * 4])
    pool.fill_lease(2)
    return pool


def restored(pool: RunnerPool, *prompts) -> RunnerPool:
    """The books of a pool made anew; `prompts` are what its cache stands for."""
    known = known_of(of_base(*prompts), pool)
    other = RunnerPool(pool.spec)
    other.restore(holdings_of(pool, known), caller=9)
    return other


@pytest.mark.parametrize("index", list(IndexKind))
@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
def test_restored_books_are_equal(index, algorithm):
    pool = busy_pool(replace(SPEC, index=index, hash_algorithm=algorithm))
    other = restored(pool, range(8), [*range(4), *[70] * 4], [*range(4), *[71] * 4])
    assert_equal_books(pool, other)
    assert {sequence.owner for sequence in other.live.values()} == {9}
    assert other.sequence("b1").blocks == other.sequence("b2").blocks


def test_what_a_restored_pool_holds_goes_on_as_before():
    pool = busy_pool(SPEC)
    other = restored(pool, range(8), [*range(4), *[70] * 4], [*range(4), *[71] * 4])
    for each in (pool, other):
        caller = each.sequence("b").owner
        rows = [news(each, "b1", [62], ask=1), news(each, "b2", [63], ask=1)]
        assert [grant.first_index for grant in each.progress(columns(rows))[0]] == [2, 2]
        each.free([], caller=caller)
        assert right(each)
    assert pool.lookup([*range(4), *[71] * 4, 1]).cached_tokens == 8
    assert other.lookup([*range(4), *[71] * 4, 1]) == pool.lookup([*range(4), *[71] * 4, 1])


def test_cached_blocks_are_given_up_in_the_order_in_which_they_were_used():
    pool = RunnerPool(PoolSpec(9, SIZE, eviction=EvictionKind.LRU))
    prompts = [[number] * 8 for number in range(4)]
    for prompt in prompts:
        cache(pool, prompt)
    cache(pool, [*prompts[1], 9])
    other = restored(pool, *prompts)
    gone = []
    for count in range(1, 5):
        other.allocate(f"x{count}", [100 + count] * 8)
        gone.append([number for number in range(4) if other.lookup([*prompts[number], 5]).cached_tokens == 0])
    assert gone == [[0], [0, 2], [0, 2, 3], [0, 1, 2, 3]]


def test_a_block_that_holds_more_than_its_sequence_says_is_found_again():
    pool = RunnerPool(SPEC)
    prefill(pool, "a", range(8))
    pool.truncate("a", 6)
    assert pool.lookup([*range(8), 9]).cached_tokens == 8
    other = restored(pool, range(8))
    assert other.lookup([*range(8), 9]).cached_tokens == 8
    assert_equal_books(pool, other)


def test_a_cached_copy_of_what_others_hold_is_free_and_told_as_forgotten():
    pool = RunnerPool(SPEC)
    pool.listen()
    holdings = Holdings(
        [HeldSequence("a", ids(range(5)), [1, 2], 5)],
        (),
        [HeldCache(BASE_SCOPE, [7, 8], [0, 7], ids(range(8)))],
    )
    pool.restore(holdings, caller=1)
    assert pool.lookup([*range(8), 9]).block_ids == (1, 8)
    assert pool.take_forgotten() == [7]
    assert pool.occupancy().free_blocks == 13
    assert right(pool)


def test_a_pool_without_a_cache_forgets_what_is_said_to_be_cached():
    pool = RunnerPool(replace(SPEC, index=IndexKind.NONE))
    pool.listen()
    pool.restore(Holdings(cached=[HeldCache(BASE_SCOPE, [7], [0], ids(range(4)))]), caller=1)
    assert pool.take_forgotten() == [7]
    assert pool.occupancy().free_blocks == 16


def test_a_parent_may_come_in_an_earlier_part_and_branches_share_it():
    pool = RunnerPool(SPEC)
    parts = [
        HeldCache(BASE_SCOPE, [5], [0], ids([0] * 4)),
        HeldCache(SALTED, [6], [0], ids([0] * 4)),
        HeldCache(BASE_SCOPE, [7, 8], [5, 5], ids([1] * 4 + [2] * 4)),
    ]
    pool.restore(Holdings(cached=parts), caller=1)
    assert pool.lookup([*[0] * 4, *[1] * 4, 9]).block_ids == (5, 7)
    assert pool.lookup([*[0] * 4, *[2] * 4, 9]).block_ids == (5, 8)
    assert pool.lookup([*[0] * 4, 9], SALTED).block_ids == (6,)
    assert pool.tenant_usage("s").cached_blocks == 1
    assert right(pool)


def test_pins_of_live_sequences_are_promised_again():
    clock = FakeClock()
    pool = RunnerPool(SPEC, clock)
    held = HeldSequence("a", ids(range(10)), [1, 2, 3], 9, retention=Retention(3, 5.0), prompt_tokens=8)
    pool.restore(Holdings([held]), caller=0)
    assert pool.promised_pins == 2
    end(pool, "a")
    assert pool.occupancy().pinned_blocks == 2
    clock.now = 6.0
    pool.lookup([1])
    pool.fill_lease(1)
    assert pool.occupancy().pinned_blocks == 0


@pytest.mark.parametrize("computed", [8, 0])
def test_a_promise_is_made_again_and_withdrawn_if_it_is_not_kept(computed):
    pool = RunnerPool(SPEC)
    a = HeldSequence("a", ids(range(10)), [1, 2, 3], 0, promised_tokens=10)
    b = HeldSequence("b", ids(range(10)), [1, 2, 4], 8, cached_tokens=8)
    pool.restore(Holdings([a, b]), caller=0)
    assert pool.lookup([*range(8), 9]).cached_tokens == 8
    assert right(pool)
    pool.free([Append("a", (), computed), Append("b", (), 8)])
    assert pool.lookup([*range(8), 9]).cached_tokens == computed
    assert pool.occupancy().cached_blocks == computed // SIZE
    assert right(pool)


@pytest.mark.parametrize("computed", [8, 0])
def test_what_is_cached_behind_a_promise_stays_or_goes_with_it(computed):
    """Somebody relied on the promise, and has ended before it was told to be kept."""
    pool = RunnerPool(SPEC)
    a = HeldSequence("a", ids(range(10)), [1, 2, 3], 0, promised_tokens=10)
    pool.restore(Holdings([a], cached=[HeldCache(BASE_SCOPE, [9], [2], ids(range(20, 24)))]), caller=0)
    prompt = [*range(8), *range(20, 24), 9]
    assert pool.lookup(prompt).block_ids == (1, 2, 9)
    assert right(pool)
    pool.free([Append("a", (), computed)])
    assert pool.lookup(prompt).cached_tokens == (12 if computed else 0)
    assert pool.occupancy().cached_blocks == (3 if computed else 0)
    assert right(pool)


A = HeldSequence("a", ids(range(6)), [1, 2], 6)
CACHED = HeldCache(BASE_SCOPE, [9], [2], ids(range(4)))
WRONG = {
    "a block in the lease and in a table": Holdings([A], [2]),
    "a block twice in the lease": Holdings([], [3, 3]),
    "a block in the lease and cached": Holdings([], [9], [HeldCache(BASE_SCOPE, [9], [0], ids(range(4)))]),
    "the null block": Holdings([replace(A, block_ids=[0, 1])]),
    "a block beyond the pool": Holdings([replace(A, block_ids=[1, 17])]),
    "a leased block beyond the pool": Holdings([], [4_000_000_000]),
    "a block twice in a table": Holdings([replace(A, block_ids=[1, 1])]),
    "computed beyond the room": Holdings([replace(A, block_ids=[1])]),
    "computed beyond the tokens": Holdings([replace(A, computed_tokens=7)]),
    "found beyond what is computed": Holdings([replace(A, computed_tokens=3, cached_tokens=4)]),
    "computed below zero": Holdings([replace(A, computed_tokens=-1, cached_tokens=-1)]),
    "a promise beyond the tokens": Holdings([replace(A, computed_tokens=4, promised_tokens=3)]),
    "a promise below zero": Holdings([replace(A, promised_tokens=-1)]),
    "no tokens": Holdings([HeldSequence("a", ids([]), [1], 0)]),
    "no blocks": Holdings([HeldSequence("a", ids([1]), [], 0)]),
    "no name": Holdings([replace(A, sequence_id="")]),
    "a name twice": Holdings([A, replace(A, block_ids=[3, 4])]),
    "a priority out of range": Holdings([replace(A, retention=Retention(priority=101))]),
    "a prompt longer than the tokens": Holdings([replace(A, prompt_tokens=7)]),
    "a shared block at two places": Holdings([A, HeldSequence("b", ids(range(6)), [2], 2)]),
    "a shared partial block of two contents": Holdings([A, HeldSequence("b", ids([0, 1, 2, 3, 4, 9]), [1, 2], 6)]),
    "a shared block behind two beginnings": Holdings([A, HeldSequence("b", ids([9, 9, 9, 9, 4, 5]), [3, 2], 6)]),
    "a shared block of two scopes": Holdings([A, replace(A, sequence_id="b", scope=SALTED)]),
    "an unknown parent": Holdings([A], (), [HeldCache(BASE_SCOPE, [9], [8], ids(range(4)))]),
    "a parent that is not full": Holdings([A], (), [CACHED]),
    "a parent of another scope": Holdings([A], (), [HeldCache(SALTED, [9], [1], ids(range(4)))]),
    "a parent that comes later": Holdings((), (), [HeldCache(BASE_SCOPE, [8, 9], [9, 0], ids(range(8)))]),
    "a cached block twice": Holdings((), (), [HeldCache(BASE_SCOPE, [9], [0], ids(range(4)))] * 2),
    "a cached block that a sequence fills otherwise": Holdings(
        [A], (), [HeldCache(BASE_SCOPE, [1], [0], ids([7] * 4))]
    ),
    "too few tokens of a cached block": Holdings((), (), [HeldCache(BASE_SCOPE, [9], [0], ids(range(3)))]),
    "too few parents": Holdings((), (), [HeldCache(BASE_SCOPE, [9], [], ids(range(4)))]),
    "a version without its adapter": Holdings((), (), [HeldCache(CacheScope("", "1"), [9], [0], ids(range(4)))]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_holdings_that_contradict_themselves_are_refused_and_leave_the_pool_empty(wrong):
    pool = RunnerPool(SPEC)
    with pytest.raises(InvalidArgument):
        pool.restore(wrong, caller=1)
    assert pool.occupancy() == Occupancy(16, 16, 0, 0, 0, 0, 0, 0)
    assert right(pool)
    pool.restore(Holdings([A]), caller=1)
    assert right(pool)


def test_salts_are_refused_where_names_can_be_made_to_collide():
    pool = RunnerPool(replace(SPEC, hash_algorithm=HashAlgorithm.XXH3))
    with pytest.raises(InvalidArgument, match="takes no cache salt"):
        pool.restore(Holdings([replace(A, scope=SALTED)]), caller=1)
    assert right(pool)
