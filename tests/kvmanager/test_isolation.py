"""Equal tokens with another meaning are never a hit: salts, adapters, images; and tokens that only look equal."""

import pytest

from kvmanager.types import BASE_SCOPE, Append, CacheScope, ContentSpan, IndexKind
from tests.kvmanager.pools import COMMON, cache, end, pool_of, prefill, right

BOTH = pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
SCOPES = [
    BASE_SCOPE,
    CacheScope("x"),
    CacheScope("x", "1"),
    CacheScope("x", "2"),
    CacheScope("y", "1"),
    CacheScope(salt="x"),
    CacheScope(salt="y"),
    CacheScope("x", "1", "x"),
    CacheScope("x", "1", "y"),
    CacheScope("lora", "x"),
    CacheScope(salt="cache_salt"),
]


@BOTH
def test_no_scope_finds_what_another_cached(index):
    pool = pool_of(num_blocks=100, index=index)
    for number, scope in enumerate(SCOPES):
        assert pool.lookup([*COMMON, 9], scope).cached_tokens == 0
        prefill(pool, str(number), COMMON, scope=scope)
    assert [pool.lookup([*COMMON, 9], scope).cached_tokens for scope in SCOPES] == [48] * len(SCOPES)
    tables = [sequence.blocks for sequence in pool.live.values()]
    assert len({block for table in tables for block in table}) == 3 * len(SCOPES)
    assert right(pool)


@BOTH
def test_two_thousand_images_behind_equal_tokens_are_never_mixed_up(index):
    pool = pool_of(num_blocks=4_100, index=index)
    for number in range(2_000):
        span = ContentSpan(f"image-{number}", 3, 20)
        assert pool.lookup([5] * 33, spans=[span]).cached_tokens == 0
        cache(pool, [5] * 32, spans=[span])
    assert pool.lookup([5] * 33).cached_tokens == 0
    hits = {pool.lookup([5] * 33, spans=[ContentSpan(f"image-{n}", 3, 20)]).block_ids for n in range(2_000)}
    assert len(hits) == 2_000
    assert pool.occupancy().cached_blocks == 4_000
    assert right(pool)


@BOTH
def test_an_image_parts_from_the_block_on_that_it_begins_in(index):
    pool = pool_of(index=index)
    cache(pool, COMMON, spans=[ContentSpan("cat", 20, 4)])
    assert pool.lookup([*COMMON, 9]).cached_tokens == 16
    assert pool.lookup([*COMMON, 9], spans=[ContentSpan("dog", 20, 4)]).cached_tokens == 16
    assert pool.lookup([*COMMON, 9], spans=[ContentSpan("cat", 21, 4)]).cached_tokens == 16
    assert pool.lookup([*COMMON, 9], spans=[ContentSpan("cat", 20, 4)]).cached_tokens == 48


@BOTH
@pytest.mark.parametrize(
    "asked",
    [
        [101, 101 - 31, *range(102, 116)],
        [101, 100, *range(102, 116)],
        [*range(100, 115), 0],
        [*range(100, 114), 115, 114],
        [0, *range(100, 115)],
    ],
    ids=[
        "plus 1 at i and minus 31 at i + 1",
        "two swapped",
        "zero at the end",
        "last two swapped",
        "shifted by a zero",
    ],
)
def test_tokens_on_which_rolling_hashes_collide_miss(index, asked):
    pool = pool_of(index=index)
    base = list(range(100, 116))
    cache(pool, base * 2)
    assert pool.lookup([*asked, 1]).cached_tokens < 16
    assert pool.lookup([*base, *asked, 1]).cached_tokens // 16 == 1
    assert pool.lookup([*base, *base, 1]).cached_tokens == 32


@BOTH
def test_blocks_of_equal_tokens_at_other_places_are_others(index):
    pool = pool_of(index=index)
    cache(pool, [1] * 16 + [2] * 16)
    assert pool.lookup([2] * 17).cached_tokens == 0
    assert pool.lookup([1] * 16 + [1] * 17).cached_tokens == 16


@BOTH
@pytest.mark.parametrize("verb", ["fork", "append"])
def test_what_a_salted_sequence_generates_stays_its_own(index, verb):
    pool = pool_of(index=index)
    scope = CacheScope(salt="s")
    prefill(pool, "a", [1] * 16, scope=scope)
    if verb == "fork":
        pool.fork("a", ["b"])
    name = "b" if verb == "fork" else "a"
    pool.append([Append(name, [2] * 16, 16)])
    pool.append([Append(name, (), 32)])
    end(pool, name)
    assert pool.lookup([1] * 16 + [2] * 17).cached_tokens == 0
    assert pool.lookup([1] * 16 + [2] * 17, scope).cached_tokens == 32
    assert right(pool)


@pytest.mark.parametrize("index", list(IndexKind))
def test_nothing_is_left_behind_when_everything_is_given_up(index):
    pool = pool_of(num_blocks=33, index=index)
    for number in range(40):
        cache(pool, [number] * 64, scope=CacheScope(salt=f"tenant-{number % 7}"))
        assert len(pool.block_pool.index) <= 32
    prefill(pool, "all", [99] * (32 * 16 - 1), skip_cache_read=True)
    end(pool, "all")
    pool.allocate("rest", [77] * (32 * 16))
    blocks = pool.block_pool
    assert len(blocks.index) == 0
    assert not any(blocks.index.names)
    assert not blocks.index.children()
    assert (blocks.policy.offered(), blocks.kept.members()) == ([], [])
    assert (blocks.priorities, blocks.pins.until, blocks.partial, blocks.tenants.of_block) == ({}, {}, {}, {})
    assert right(pool)


def test_a_long_parent_and_64_children_take_no_new_block_of_either_index():
    for index in (IndexKind.HASH, IndexKind.RADIX):
        pool = pool_of(num_blocks=6_260, index=index)
        prefill(pool, "p", [1] * 100_000)
        pool.fork("p", [f"c{number}" for number in range(64)])
        assert pool.occupancy().held_blocks == 6_250
        assert pool.occupancy().shared_blocks == 6_250
        assert pool.occupancy().free_blocks == 9
        assert pool.table_entries == 65 * 6_250
        assert right(pool)
