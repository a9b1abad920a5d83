"""The verbs of a pool against numbers worked out by hand and against vLLM's published behaviours."""

import copy

import pytest

import kvmanager.pool
from kvmanager import Pool
from kvmanager.errors import (
    BrokenBooks,
    InvalidArgument,
    NeverFits,
    NotOwner,
    PoolBusy,
    PoolShort,
    SequenceExists,
    UnknownSequence,
)
from kvmanager.types import Append, BlockCopy, CacheScope, Grant, PoolSpec

COMMON = [0] * 16 + [1] * 16 + [2] * 16
COMPILED = not str(kvmanager.pool.__file__).endswith(".py")


def pool_of(num_blocks=11, block_size=16):
    return Pool(PoolSpec(num_blocks, block_size))


def prefill(pool, sequence_id, tokens, **options):
    """Allocates and commits a whole prompt, as a runner does."""
    allocation = pool.allocate(sequence_id, tokens, **options)
    pool.append([Append(sequence_id, (), len(tokens))])
    return allocation


def end(pool, *sequence_ids):
    return pool.free([Append(sequence_id) for sequence_id in sequence_ids])


def blocks_in_order(pool):
    """Free and cached blocks in the order in which they will be handed out."""
    if COMPILED:
        pytest.skip("compiled books can't be copied")
    twin = copy.deepcopy(pool.block_pool)
    return [twin.take(1, twin.tenants.base)[0] for _ in range(twin.available)]


def counts(pool, blocks):
    return [pool.block_pool.counts[block] for block in blocks]


@pytest.fixture(autouse=True)
def _always_checked(monkeypatch):
    """After each test, every pool that it made passes its own check."""
    made = []
    real = Pool.__init__

    def record(self, *arguments):
        real(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Pool, "__init__", record)
    yield
    for pool in made:
        assert pool.check().violations == ()
        assert pool.imbalance() == 0


class TestAllocate:
    def test_cold_prefill(self):
        pool = pool_of()
        allocation = prefill(pool, "a", COMMON + [3] * 7)
        assert (allocation.block_ids, allocation.cached_tokens) == ((1, 2, 3, 4), 0)
        assert counts(pool, [1, 2, 3, 4]) == [1, 1, 1, 1]
        names = [bool(view.block_hash) for view in pool.block_table("a")[1]]
        assert names == [True, True, True, False]

    def test_prefix_shared_with_a_running_sequence(self):
        pool = pool_of()
        prefill(pool, "a", COMMON + [3] * 7)
        allocation = prefill(pool, "b", COMMON + [3] * 5)
        assert (allocation.block_ids, allocation.cached_tokens) == ((1, 2, 3, 5), 48)
        assert counts(pool, [1, 2, 3]) == [2, 2, 2]
        assert pool.occupancy().free_blocks == 5
        assert pool.occupancy().shared_blocks == 3

    def test_order_of_reuse_after_both_are_freed(self):
        pool = pool_of()
        prefill(pool, "a", COMMON + [3] * 7)
        prefill(pool, "b", COMMON + [3] * 5)
        end(pool, "a")
        end(pool, "b")
        assert blocks_in_order(pool) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]

    def test_hit_of_cached_blocks(self):
        pool = pool_of()
        prefill(pool, "a", COMMON + [3] * 7)
        prefill(pool, "b", COMMON + [3] * 5)
        end(pool, "a", "b")
        allocation = prefill(pool, "c", COMMON + [3] * 6)
        # The tail comes from the block that was given back last: "b" was freed after "a".
        assert (allocation.block_ids, allocation.cached_tokens) == ((1, 2, 3, 5), 48)
        assert pool.occupancy().free_blocks == 6

    def test_the_last_token_is_always_computed(self):
        pool = pool_of()
        for hit in (0, 32, 32):
            assert prefill(pool, "a", COMMON).cached_tokens == hit
            end(pool, "a")
        assert prefill(pool, "a", [*COMMON, 9]).cached_tokens == 48

    def test_nothing_is_found_before_it_is_computed(self):
        pool = pool_of()
        pool.allocate("a", [*COMMON, 9])
        pool.append([Append("a", (), 20)])
        assert pool.lookup([*COMMON, 9]).cached_tokens == 16

    def test_reuse_takes_the_name_away(self):
        pool = pool_of(num_blocks=2)
        prefill(pool, "a", [7] * 16)
        end(pool, "a")
        assert pool.lookup([7] * 17).cached_tokens == 16
        assert pool.allocate("b", [8] * 15).block_ids == (1,)
        assert pool.block_table("b")[1][0].block_hash == b""
        assert pool.lookup([7] * 17).cached_tokens == 0
        assert pool.totals.evicted_blocks == 1

    def test_a_sequence_that_never_fits_is_refused_with_the_numbers(self):
        pool = pool_of(num_blocks=4)
        with pytest.raises(NeverFits, match="49 tokens needs 4 blocks of 16, and the pool has 3 usable: at most 48"):
            pool.allocate("a", [1] * 49)
        assert len(pool.allocate("a", [1] * 48).block_ids) == 3

    def test_a_failed_allocation_keeps_nothing(self):
        pool = pool_of(num_blocks=6)
        prefill(pool, "old", COMMON)
        end(pool, "old")
        pool.allocate("big", [5] * 32)
        before = pool.occupancy(), blocks_in_order(pool)
        with pytest.raises(PoolShort, match="4 blocks are needed, 3 are free or cached"):
            pool.allocate("b", [*COMMON, 6])  # 3 idle hits and 1 fresh block
        assert (pool.occupancy(), blocks_in_order(pool)) == before
        assert pool.totals.allocation_failures == 1
        assert pool.totals.queried_tokens == 48 + 32

    def test_a_hit_is_not_evicted_by_the_call_that_hits_it(self):
        pool = pool_of(num_blocks=6)
        for prompt in (COMMON, [7] * 32):
            prefill(pool, "old", prompt)
            end(pool, "old")
        # None is free, and the hits were used the longest ago.
        allocation = pool.allocate("b", [*COMMON, 6])
        assert allocation.cached_tokens == 48
        assert len(set(allocation.block_ids)) == 4
        assert pool.check().violations == ()

    def test_headroom_is_left_over(self):
        pool = pool_of(num_blocks=6)
        with pytest.raises(PoolShort):
            pool.allocate("a", [1] * 48, headroom_blocks=3)
        assert pool.allocate("a", [1] * 48, headroom_blocks=2).block_ids == (1, 2, 3)

    def test_salts_part_tenants(self):
        pool = pool_of(num_blocks=40)
        hits = []
        for number, salt in enumerate(["salt1", "salt1", "salt2", ""]):
            hits.append(prefill(pool, str(number), COMMON + [number] * 11, scope=CacheScope(salt=salt)).cached_tokens)
        assert hits == [0, 48, 0, 0]

    def test_adapters_and_their_versions_part(self):
        pool = pool_of(num_blocks=40)
        hits = []
        for number, scope in enumerate([CacheScope("x"), CacheScope("x", "2"), CacheScope(salt="x"), CacheScope("x")]):
            hits.append(prefill(pool, str(number), [*COMMON, 9], scope=scope).cached_tokens)
        assert hits == [0, 0, 0, 48]

    def test_a_sequence_that_skips_the_cache_still_fills_it(self):
        pool = pool_of()
        prefill(pool, "a", COMMON)
        end(pool, "a")
        assert prefill(pool, "b", [*COMMON, 9], skip_cache_read=True).cached_tokens == 0
        end(pool, "b")
        assert pool.lookup([*COMMON, 9]).cached_tokens == 48
        assert pool.totals.queried_tokens == 48

    def test_a_resumed_sequence_hits_but_is_not_counted(self):
        pool = pool_of()
        prefill(pool, "a", COMMON)
        end(pool, "a")
        assert prefill(pool, "a", [*COMMON, 9], resumed=True).cached_tokens == 48
        assert (pool.totals.queried_tokens, pool.totals.hit_tokens) == (48, 0)

    @pytest.mark.parametrize(
        ("sequence_id", "tokens", "sentence"),
        [
            ("a", [], "at least 1"),
            ("", [1], "1 to 256 bytes, got 0"),
            ("x" * 257, [1], "got 257"),
            ("a\n", [1], "cannot be printed"),
            ("a", [1, -1], "token id -1 at index 1"),
            ("a", [1 << 32], "token id 4294967296 at index 0"),
        ],
    )
    def test_nonsense_is_refused(self, sequence_id, tokens, sentence):
        pool = pool_of()
        with pytest.raises(InvalidArgument, match=sentence):
            pool.allocate(sequence_id, tokens)
        assert pool.occupancy().held_blocks == 0

    def test_an_id_lives_once(self):
        pool = pool_of()
        pool.allocate("a", [1])
        with pytest.raises(SequenceExists, match="'a'"):
            pool.allocate("a", [2])
        assert pool.occupancy().held_blocks == 1

    def test_salt_length(self):
        pool_of().allocate("a", [1], scope=CacheScope(salt="s" * 128))
        with pytest.raises(InvalidArgument, match="at most 128 bytes, got 129"):
            pool_of().allocate("a", [1], scope=CacheScope(salt="s" * 129))


class TestAppend:
    def test_a_block_is_added_at_the_boundary_only(self):
        pool = pool_of()
        prefill(pool, "a", [1] * 15)
        assert pool.append([Append("a", [2], 15)]) == []
        grant = pool.append([Append("a", [3], 16)])[0]
        assert (grant.first_index, grant.block_ids) == (1, (2,))

    def test_generated_tokens_are_cached_like_prompt_tokens(self):
        pool = pool_of()
        prefill(pool, "a", [1] * 10)
        pool.append([Append("a", [2] * 10, 10)])
        pool.free([Append("a", (), 20)])
        assert pool.lookup([1] * 10 + [2] * 10).cached_tokens == 16

    def test_all_or_none(self):
        pool = pool_of(num_blocks=4)
        prefill(pool, "a", [1] * 16)
        prefill(pool, "b", [2] * 16)
        with pytest.raises(PoolShort, match="2 blocks are needed, 1 are free"):
            pool.append([Append("a", [1], 16), Append("b", [2], 16)])
        assert pool.occupancy().free_blocks == 1
        assert pool.sequence("a").num_tokens == 16
        assert pool.append([Append("b", [2], 16)])[0].block_ids == (3,)

    def test_growth_beyond_the_pool_never_fits(self):
        pool = pool_of(num_blocks=2)
        prefill(pool, "a", [1] * 16)
        with pytest.raises(NeverFits, match="17 tokens needs 2 blocks"):
            pool.append([Append("a", [1], 16)])

    @pytest.mark.parametrize("computed", [-1, 9, 17, 33])
    def test_computed_tokens_stay_in_range(self, computed):
        pool = pool_of()
        prefill(pool, "a", [1] * 10)
        with pytest.raises(InvalidArgument, match=f"computed_tokens {computed}"):
            pool.append([Append("a", [1] * 6, computed)])

    def test_unknown_and_doubled_sequences(self):
        pool = pool_of()
        pool.allocate("a", [1])
        with pytest.raises(UnknownSequence, match="'b' among 1"):
            pool.append([Append("a", [2], 1), Append("b", [2], 1)])
        with pytest.raises(InvalidArgument, match="twice"):
            pool.append([Append("a"), Append("a")])
        assert pool.sequence("a").num_tokens == 1

    def test_equal_blocks_computed_side_by_side(self):
        pool = pool_of()
        pool.allocate("a", [1] * 17)
        pool.allocate("b", [1] * 17)
        pool.append([Append("a", (), 17), Append("b", (), 17)])
        assert pool.lookup([1] * 17).block_ids == (1,)
        end(pool, "a")  # the block of "b" takes over, so that of "a" is free at once
        assert pool.lookup([1] * 17).block_ids == (3,)
        assert pool.occupancy().cached_blocks == 0
        end(pool, "b")
        assert pool.occupancy().cached_blocks == 1

    def test_a_held_block_replaces_a_cached_one_of_the_same_content(self):
        pool = pool_of()
        pool.allocate("late", [1] * 17)
        prefill(pool, "a", [1] * 17)
        end(pool, "a")
        assert pool.lookup([1] * 17).block_ids == (3,)
        pool.append([Append("late", (), 17)])
        assert pool.lookup([1] * 17).block_ids == (1,)
        assert pool.occupancy().cached_blocks == 0


class TestFork:
    def test_children_share_every_block(self):
        pool = pool_of()
        prefill(pool, "p", [1] * 20)
        assert pool.fork("p", ["c", "d"]) == (1, 2)
        assert counts(pool, [1, 2]) == [3, 3]
        assert pool.occupancy().held_blocks == 2
        assert pool.occupancy().shared_blocks == 2
        assert pool.totals.forks == 2

    def test_the_last_writer_keeps_the_shared_tail(self):
        pool = pool_of()
        prefill(pool, "p", [1] * 20)
        pool.fork("p", ["c", "d"])
        grants = pool.append([Append(name, [2], 20) for name in ("p", "c", "d")])
        assert grants == [Grant("p", 1, (3,), (BlockCopy(2, 3, 4),)), Grant("c", 1, (4,), (BlockCopy(2, 4, 4),))]
        assert pool.block_table("d")[1][1].block_id == 2
        assert counts(pool, [1, 2, 3, 4]) == [3, 1, 1, 1]
        assert pool.totals.copies == 2

    def test_a_full_tail_needs_no_copy(self):
        pool = pool_of()
        prefill(pool, "p", [1] * 16)
        pool.fork("p", ["c"])
        grants = pool.append([Append("p", [2], 16), Append("c", [3], 16)])
        assert [grant.block_ids for grant in grants] == [(2,), (3,)]
        assert all(not grant.copies for grant in grants)

    def test_uncomputed_shared_blocks_are_replaced_and_not_copied(self):
        pool = pool_of()
        pool.allocate("p", [1] * 40)
        pool.append([Append("p", (), 16)])
        pool.fork("p", ["c"])
        grant = pool.append([Append("c", [], 16)])[0]
        assert (grant.first_index, grant.block_ids, grant.copies) == (1, (4, 5), ())

    def test_a_copy_counts_as_a_needed_block(self):
        pool = pool_of(num_blocks=3)
        prefill(pool, "p", [1] * 20)
        pool.fork("p", ["c"])
        with pytest.raises(PoolShort, match="1 blocks are needed, 0 are free"):
            pool.append([Append("c", [2], 20)])
        assert counts(pool, [1, 2]) == [2, 2]
        end(pool, "p")
        assert pool.append([Append("c", [2], 20)]) == []
        assert pool.totals.copies == 0

    def test_refusals(self):
        pool = pool_of()
        pool.allocate("p", [1])
        with pytest.raises(UnknownSequence):
            pool.fork("q", ["c"])
        with pytest.raises(SequenceExists):
            pool.fork("p", ["c", "p"])
        with pytest.raises(InvalidArgument, match="twice"):
            pool.fork("p", ["c", "c"])
        with pytest.raises(InvalidArgument, match="names 0 children; name 1 to 1024"):
            pool.fork("p", [])
        assert counts(pool, [1]) == [1]

    def test_a_long_parent_takes_no_new_block(self):
        pool = pool_of(num_blocks=6_260)
        prefill(pool, "p", [1] * 100_000)
        held = pool.occupancy().held_blocks
        pool.fork("p", [f"c{number}" for number in range(64)])
        assert pool.occupancy().held_blocks == held == 6_250
        assert counts(pool, [1]) == [65]

    @pytest.mark.parametrize("verb", ["append", "free"])
    def test_a_commit_of_what_was_written_into_a_shared_block_is_refused(self, verb):
        pool = pool_of()
        prefill(pool, "a", [1] * 10)
        pool.fork("a", ["b"])
        with pytest.raises(InvalidArgument, match="'b' says that it computed tokens in block 1, which 2 block tables"):
            getattr(pool, verb)([Append("b", [2] * 6, 16)])
        assert pool.lookup([1] * 10 + [2] * 7).cached_tokens == 0
        assert pool.sequence("b").num_tokens == 10

    def test_tokens_computed_before_the_fork_may_be_told_after_it(self):
        pool = pool_of()
        pool.allocate("p", [1] * 20)
        pool.fork("p", ["c"])
        grants = pool.append([Append("p", [2], 20), Append("c", [3], 20)])
        assert grants == [Grant("p", 1, (3,), (BlockCopy(2, 3, 4),))]
        assert pool.lookup([1] * 17).cached_tokens == 16

    def test_no_more_children_than_1024(self):
        pool = pool_of()
        pool.allocate("p", [1])
        with pytest.raises(InvalidArgument, match="names 1025 children"):
            pool.fork("p", [str(number) for number in range(1025)])
        assert len(pool.fork("p", [str(number) for number in range(1024)])) == 1


class TestOwners:
    """What a runner allocated, nobody else may change: only the runner knows what it is writing."""

    @pytest.mark.parametrize("caller", [0, 8])
    def test_others_are_refused(self, caller):
        pool = pool_of()
        pool.allocate("a", [1] * 10, caller=7)
        pool.fork("a", ["b"], caller=7)
        for verb in (
            lambda: pool.append([Append("b", [2], 10)], caller=caller),
            lambda: pool.fork("b", ["c"], caller=caller),
            lambda: pool.free([Append("b")], caller=caller),
        ):
            with pytest.raises(NotOwner, match=f"'b' belongs to the runner of epoch 7, .* epoch {caller}$"):
                verb()
        assert pool.occupancy().sequences == 2
        assert pool.free([Append("a"), Append("b")], caller=7).freed == 2

    def test_what_was_made_by_hand_anybody_may_change(self):
        pool = pool_of()
        pool.allocate("a", [1] * 10)
        pool.append([Append("a", [2], 10)], caller=7)
        assert pool.free([Append("a")]).freed == 1


class TestFree:
    def test_unknown_ids_are_counted(self):
        pool = pool_of()
        pool.allocate("a", [1])
        outcome = pool.free([Append("a"), Append("b"), Append("a")])
        assert (outcome.freed, outcome.unknown) == (1, 1)
        assert pool.totals.unknown_frees == 1
        assert pool.occupancy().held_blocks == 0

    def test_a_bad_last_commit_frees_nothing(self):
        pool = pool_of()
        pool.allocate("a", [1])
        pool.allocate("b", [1])
        with pytest.raises(InvalidArgument):
            pool.free([Append("a"), Append("b", (), 5)])
        assert pool.occupancy().sequences == 2

    def test_partial_tails_are_reused_before_cached_blocks(self):
        pool = pool_of(num_blocks=5)
        prefill(pool, "keep", [1] * 33)
        end(pool, "keep")
        for number in range(20):
            prefill(pool, "short", [number] * 3)
            end(pool, "short")
        assert pool.lookup([1] * 33).cached_tokens == 32

    def test_a_block_outlives_those_that_follow_it(self):
        pool = pool_of(num_blocks=5)
        prefill(pool, "a", list(range(64)))
        end(pool, "a")
        hits = []
        for number in range(4):
            hits.append(pool.lookup([*range(64), 99]).cached_tokens)
            pool.allocate(f"taker{number}", [100 + number])
        assert hits == [64, 48, 32, 16]
        assert pool.lookup([*range(64), 99]).cached_tokens == 0

    def test_a_double_release_names_the_block_and_changes_nothing(self):
        pool = pool_of()
        with pytest.raises(BrokenBooks, match="block 3 was released with a count of 0"):
            pool.block_pool.release([3])
        with pytest.raises(BrokenBooks):
            pool.block_pool.release([0])


class TestTokens:
    def test_stored_and_reserved(self):
        pool = pool_of()
        prefill(pool, "a", [1] * 20)
        assert (pool.occupancy().stored_tokens, pool.occupancy().reserved_tokens) == (20, 32)
        pool.fork("a", ["b"])
        assert pool.occupancy().stored_tokens == 20
        pool.append([Append("b", [2], 20)])
        assert (pool.occupancy().stored_tokens, pool.occupancy().reserved_tokens) == (24, 48)
        end(pool, "a", "b")
        assert (pool.occupancy().stored_tokens, pool.occupancy().reserved_tokens) == (0, 0)


class TestOperator:
    def test_reset_needs_an_idle_pool(self):
        pool = pool_of()
        prefill(pool, "a", COMMON)
        prefill(pool, "b", COMMON)
        with pytest.raises(PoolBusy, match="2 live sequences hold"):
            pool.reset_cache()
        assert pool.lookup([*COMMON, 1]).cached_tokens == 48
        end(pool, "a", "b")
        assert pool.reset_cache() == 3
        assert pool.lookup([*COMMON, 1]).cached_tokens == 0
        assert pool.occupancy().free_blocks == 10

    def test_sequences_come_in_pages(self):
        pool = pool_of()
        for name in ("b", "a", "c"):
            pool.allocate(name, [1])
        assert [view.sequence_id for view in pool.sequences(limit=2)] == ["a", "b"]
        assert [view.sequence_id for view in pool.sequences(after="b")] == ["c"]

    def test_lookup_changes_nothing(self):
        pool = pool_of()
        prefill(pool, "a", COMMON)
        end(pool, "a")
        before = blocks_in_order(pool)
        assert pool.lookup([*COMMON, 1]).block_ids == (1, 2, 3)
        assert blocks_in_order(pool) == before
        assert pool.totals.queried_tokens == 48


@pytest.mark.parametrize("num_blocks", [-1, 0, 1, (1 << 24) + 1])
def test_pools_that_hold_nothing_are_refused(num_blocks):
    with pytest.raises(InvalidArgument, match="a pool has 2 to 16777216 blocks"):
        Pool(PoolSpec(num_blocks, 16))


@pytest.mark.parametrize("block_size", [0, -1, 3, 17, 2048, 1 << 31])
def test_block_sizes_are_powers_of_two(block_size):
    with pytest.raises(InvalidArgument, match=f"not {block_size}$"):
        Pool(PoolSpec(10, block_size))
