"""What a runner says in a session: facts are written down, asks are answered, and its lease is part of the books."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvmanager.errors import InvalidArgument, NeverFits, PoolShort, QuotaShort
from kvmanager.runner_pool import Refused, RunnerPool
from kvmanager.types import BlockCopy, CacheScope, Grant, PoolSpec
from tests.kvmanager.pools import NewsRow, cache, columns, end, prefill, right

SIZE = 4


def pool_of(usable: int = 10, **facts) -> RunnerPool:
    return RunnerPool(PoolSpec(usable + 1, SIZE, **facts))


def news(
    pool: RunnerPool,
    sequence_id: str,
    tokens: Sequence[int] = (),
    computed: int | None = None,
    entries: int = 0,
    taken: Sequence[int] = (),
    ask: int = 0,
) -> NewsRow:
    sequence = pool.sequence(sequence_id)
    now = sequence.computed if computed is None else computed
    return sequence, tokens, now, entries, taken, ask


def progress(pool: RunnerPool, rows: Sequence[NewsRow], **options) -> tuple[list[Grant], list[Refused]]:
    return pool.progress(columns(rows), **options)


def test_a_lease_is_held_and_counted():
    pool = pool_of(10)
    assert pool.fill_lease(3) == [1, 2, 3]
    assert pool.fill_lease(3) == []
    now = pool.occupancy()
    assert (now.free_blocks, now.held_blocks, now.leased_blocks, now.sequences) == (7, 3, 3, 0)
    assert right(pool)


@pytest.mark.parametrize(("held", "leased"), [(0, 4), (2, 4), (3, 3), (5, 1), (6, 0), (8, 0)])
def test_a_lease_leaves_as_many_blocks_to_others(held, leased):
    pool = pool_of(10)
    if held:
        pool.allocate("a", [0] * (held * SIZE))
    assert len(pool.fill_lease(4)) == leased


def test_a_lease_takes_cached_blocks_but_not_beyond_the_quota_of_who_gives_no_salt():
    pool = pool_of(8)
    cache(pool, [7] * 24)
    assert pool.occupancy().cached_blocks == 6
    pool.set_quota("", 3)
    assert len(pool.fill_lease(4)) == 3
    assert pool.occupancy().cached_blocks == 0
    assert right(pool)


def test_blocks_given_back_are_free_and_strangers_are_refused():
    pool = pool_of()
    one, two, three = pool.fill_lease(3)
    for wrong in ([one, 9], [one, one], [0]):
        with pytest.raises(InvalidArgument, match=f"block {wrong[-1]} is not in the lease of 3 blocks"):
            pool.give_back(wrong)
    pool.give_back([three, one])
    assert pool.lease.members() == [two]
    assert pool.occupancy().free_blocks == 9
    assert right(pool)


def test_a_taken_block_moves_from_the_lease_to_the_end_of_a_table():
    pool = pool_of()
    prefill(pool, "a", [1] * 4)
    lease = pool.fill_lease(2)
    grants, refused = progress(pool, [news(pool, "a", [2, 3], 6, 1, lease[1:])])
    assert (grants, refused) == ([], [])
    assert pool.sequence("a").blocks[1:] == lease[1:]
    assert pool.lease.members() == lease[:1]
    now = pool.occupancy()
    assert (now.held_blocks, now.leased_blocks, now.stored_tokens) == (3, 1, 6)
    assert right(pool)


def test_a_taken_block_is_that_of_its_sequences_tenant():
    pool = pool_of()
    prefill(pool, "a", [1] * 4, scope=CacheScope(salt="s"))
    lease = pool.fill_lease(2)
    assert (pool.tenant_usage().held_blocks, pool.tenant_usage("s").held_blocks) == (2, 1)
    progress(pool, [news(pool, "a", [2], 5, 1, lease[:1])])
    assert (pool.tenant_usage().held_blocks, pool.tenant_usage("s").held_blocks) == (1, 2)
    assert right(pool)
    end(pool, "a")
    assert right(pool)


def test_blocks_taken_replace_what_was_granted_and_not_waited_for():
    pool = pool_of()
    prefill(pool, "a", [1] * 4)
    lease = pool.fill_lease(1)
    grants, _ = progress(pool, [news(pool, "a", ask=6)])
    assert [len(grant.block_ids) for grant in grants] == [2]
    free = pool.occupancy().free_blocks
    progress(pool, [news(pool, "a", [5], 5, 1, lease)])
    assert pool.sequence("a").blocks[1:] == lease
    assert pool.occupancy().free_blocks == free + 2
    assert right(pool)


def test_growth_from_the_lease_is_written_down_over_the_quota_and_asks_are_refused_by_it():
    pool = pool_of()
    pool.set_quota("s", 2)
    prefill(pool, "a", [1] * 8, scope=CacheScope(salt="s"))
    progress(pool, [news(pool, "a", [2], 9, 2, pool.fill_lease(1))])
    assert pool.tenant_usage("s").held_blocks == 3
    grants, refused = progress(pool, [news(pool, "a", [3] * 4, ask=1)])
    assert grants == []
    # A sequence of four blocks could never be within a quota of two.
    assert [type(error) for _, error in refused] == [NeverFits]
    prefill(pool, "b", [4])
    pool.set_quota("s", 4)
    pool.allocate("c", [5], scope=CacheScope(salt="s"))
    _, refused = progress(pool, [news(pool, "a", ask=1)])
    assert [type(error) for _, error in refused] == [QuotaShort]
    assert right(pool)


def test_facts_are_committed_when_asks_are_refused_and_asks_are_answered_one_by_one():
    pool = pool_of(4)
    for name in "abc":
        prefill(pool, name, [ord(name)] * 4)
    rows = [news(pool, name, [9], ask=1) for name in "abc"]
    grants, refused = progress(pool, rows)
    assert grants == [Grant("a", 1, (4,))]
    assert [(sequence.sequence_id, type(error)) for sequence, error in refused] == [("b", PoolShort), ("c", PoolShort)]
    assert [pool.sequence(name).num_tokens for name in "abc"] == [5, 5, 5]
    assert pool.totals.allocation_failures == 2
    assert right(pool)


def test_an_ask_makes_a_shared_tail_the_sequences_own():
    pool = pool_of()
    prefill(pool, "a", [1] * 6)
    pool.fork("a", ["b"])
    grants, refused = progress(pool, [news(pool, "a", [2], ask=1), news(pool, "b", [3], ask=1)])
    assert refused == []
    # The second of the two is alone with the old block by then.
    assert grants == [Grant("a", 1, (3,), (BlockCopy(2, 3, 2),))]
    assert right(pool)


def test_an_ask_with_all_computed_is_for_the_write_that_comes_next():
    pool = pool_of()
    prefill(pool, "a", [1] * 6)
    pool.fork("a", ["b"])
    grants, _ = progress(pool, [news(pool, "a", ask=1)])
    assert grants == [Grant("a", 1, (3,), (BlockCopy(2, 3, 2),))]
    progress(pool, [news(pool, "a", [2])])
    progress(pool, [news(pool, "a", computed=7)])
    assert right(pool)


def test_a_block_that_holds_something_else_is_not_filled_without_an_ask():
    pool = pool_of()
    prefill(pool, "a", [1] * 8)
    pool.truncate("a", 6)
    progress(pool, [news(pool, "a", [2, 2])])
    with pytest.raises(InvalidArgument, match="block 2, which holds others"):
        progress(pool, [news(pool, "a", computed=8)])
    assert pool.sequence("a").computed == 6
    assert right(pool)


def test_a_shared_tail_stores_what_any_of_its_holders_says_and_no_more():
    pool = pool_of()
    prefill(pool, "a", [1] * 4)
    progress(pool, [news(pool, "a", [2, 2, 2], ask=1)])
    pool.fork("a", ["b"])
    stored = []
    for a, b in [(6, 5), (6, 6), (6, 7), (8, 7)]:
        if a == 8:
            # A write of one's own needs a block of one's own: its copy stores 3 tokens, and a fourth.
            progress(pool, [news(pool, "a", [3], ask=1)])
        progress(pool, [news(pool, "a", computed=a), news(pool, "b", computed=b)])
        stored.append(pool.occupancy().stored_tokens)
        assert right(pool)
    assert stored == [4 + 2, 4 + 2, 4 + 3, 4 + 3 + 4]


def test_an_ended_sequence_is_refused_wherever_it_stands_and_nothing_is_told():
    pool = pool_of()
    prefill(pool, "a", [1] * 6)
    prefill(pool, "b", [2] * 6)
    rows = [news(pool, "a", [3], computed=6), news(pool, "b", [3], computed=6)]
    end(pool, "b")
    with pytest.raises(InvalidArgument, match="'b' has ended"):
        progress(pool, rows)
    assert pool.sequence("a").num_tokens == 6


WRONG = {
    "computed tokens shrink": {"computed": 3},
    "computed beyond what is known": {"tokens": [1], "computed": 8, "entries": 2, "taken": [1]},
    "computed beyond the room": {"tokens": [1] * 9, "computed": 9},
    "a block that is not in the lease": {"entries": 2, "taken": [9]},
    "a block twice": {"entries": 2, "taken": [1, 1]},
    "the null block": {"entries": 2, "taken": [0]},
    "a block behind a table that is not there": {"entries": 3, "taken": [1]},
    "a block in the place of what is computed": {"entries": 1, "taken": [1]},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_news_that_cannot_be_true_change_nothing(wrong):
    pool = pool_of()
    assert pool.fill_lease(2) == [1, 2]
    prefill(pool, "a", [1] * 6)
    prefill(pool, "b", [2] * 4)
    before = (pool.occupancy(), pool.block_table("a"), pool.block_table("b"), pool.lease.members())
    with pytest.raises(InvalidArgument):
        progress(pool, [news(pool, "b", [1], ask=1), news(pool, "a", **wrong)])
    assert (pool.occupancy(), pool.block_table("a"), pool.block_table("b"), pool.lease.members()) == before
    assert right(pool)


def test_a_sequence_is_named_once_and_lives():
    pool = pool_of()
    prefill(pool, "a", [1] * 4)
    row = news(pool, "a", [2])
    with pytest.raises(InvalidArgument, match="named twice"):
        progress(pool, [row, row])
    end(pool, "a")
    with pytest.raises(InvalidArgument, match="has ended"):
        progress(pool, [row])


def test_a_rewind_of_tokens_without_room_keeps_what_the_last_block_stores():
    pool = pool_of()
    pool.allocate("a", [1] * 4)
    progress(pool, [news(pool, "a", [2] * 5, 3)])
    assert pool.truncate("a", 8) == 0
    assert pool.occupancy().stored_tokens == 3
    assert right(pool)


def test_the_end_of_a_runner_ends_its_sequences_and_no_others():
    pool = pool_of()
    pool.allocate("people's", [1] * 4)
    pool.allocate("a", [2] * 8, caller=7)
    progress(pool, [news(pool, "a", computed=5)])
    pool.fill_lease(2)
    assert pool.end_runner(7) == 1
    assert list(pool.live) == ["people's"]
    now = pool.occupancy()
    assert (now.held_blocks, now.cached_blocks, now.leased_blocks) == (1, 1, 0)
    assert right(pool)


def test_blocks_whose_names_go_are_noted_while_somebody_listens():
    pool = pool_of(4)
    cache(pool, [1] * 8)
    pool.remove_prefix([1] * 8)
    assert pool.take_forgotten() == []
    pool.listen()
    cache(pool, [2] * 8)
    by_name = pool.block_pool.index.owners()
    pool.remove_prefix([2] * 8)
    assert sorted(pool.take_forgotten()) == sorted(by_name.values())
    assert pool.take_forgotten() == []
    cache(pool, [3] * 8)
    evicted = set(pool.block_pool.index.owners().values())
    pool.allocate("all", [4] * 16)
    assert set(pool.take_forgotten()) == evicted
    end(pool, "all")
    cache(pool, [5] * 8)
    cached = set(pool.block_pool.index.owners().values())
    pool.reset_cache()
    assert set(pool.take_forgotten()) == cached
    pool.stop_listening()
    cache(pool, [6] * 8)
    pool.reset_cache()
    assert pool.take_forgotten() == []


def test_the_block_of_a_copy_that_ends_is_forgotten_and_the_other_is_not():
    pool = pool_of()
    pool.listen()
    for name in "ab":
        prefill(pool, name, [1] * 4, skip_cache_read=True)
    own = pool.sequence("b").blocks[0]
    end(pool, "b")
    assert pool.take_forgotten() == [own]
    end(pool, "a")
    assert pool.take_forgotten() == []


def test_a_block_that_is_named_again_is_not_told_as_forgotten():
    pool = pool_of(2)
    cache(pool, [1] * 8)
    pool.listen()
    cache(pool, [2] * 8)
    assert pool.block_pool.index.owners()
    assert pool.take_forgotten() == []


def test_check_sees_a_leased_block_in_a_table_and_one_without_its_count():
    pool = pool_of()
    pool.allocate("a", [1] * 4)
    (block,) = pool.fill_lease(1)
    pool.sequence("a").blocks.append(block)
    assert f"block {block} is in the lease and in a block table" in pool.check().violations
    pool.sequence("a").blocks.pop()
    assert right(pool)
    pool.block_pool.counts[block] = 0
    assert any(f"block {block} has count 0, but 1 table entries" in sentence for sentence in pool.check().violations)


def test_a_plain_row_of_an_ended_sequence_is_refused():
    pool = pool_of()
    prefill(pool, "a", [1] * 5)
    prefill(pool, "b", [2] * 5)
    progress(pool, [news(pool, "a", [3], ask=1), news(pool, "b", [3], ask=1)])
    rows = [news(pool, "a", computed=6), news(pool, "b", computed=6)]
    end(pool, "b")
    with pytest.raises(InvalidArgument, match="'b' has ended"):
        progress(pool, rows)
    assert pool.sequence("a").computed == 5
    assert right(pool)


def busy_pool() -> RunnerPool:
    """Five sequences of 5 to 9 tokens, two of which share a tail, all with room; and a lease of three blocks."""
    pool = pool_of(30)
    for length, name in enumerate("abcd", 5):
        prefill(pool, name, [length] * length)
        progress(pool, [news(pool, name, [9] * 3, ask=3)])
    pool.fork("d", ["e"])
    assert len(pool.fill_lease(3)) == 3
    return pool


def test_news_of_all_kinds_in_one_message_are_those_told_one_by_one():
    """Plain ones, full blocks, taken blocks, and none, of different numbers of tokens."""
    together, apart = busy_pool(), busy_pool()
    taken = together.lease.members()[:2]

    def rows(pool: RunnerPool) -> list[NewsRow]:
        return [
            news(pool, "a", [1], computed=6),
            news(pool, "b", [2, 3], computed=9),
            news(pool, "c", [], computed=8, entries=len(pool.sequence("c").blocks), taken=taken),
            news(pool, "d", [4, 5, 6], computed=9),
            news(pool, "e", [7]),
        ]

    assert progress(together, rows(together)) == ([], [])
    for row in rows(apart):
        assert progress(apart, [row]) == ([], [])
    for name in "abcde":
        assert together.block_table(name) == apart.block_table(name)
        assert together.sequence(name).chain.token_ids == apart.sequence(name).chain.token_ids
    assert list(together.sequence("d").chain.token_ids) == [8] * 8 + [9] * 3 + [4, 5, 6]
    assert [together.sequence(name).computed for name in "abcde"] == [6, 9, 8, 9, 8]
    assert together.occupancy() == apart.occupancy()
    assert right(together)
    assert right(apart)


def test_computed_0_is_as_before():
    pool = pool_of()
    prefill(pool, "a", [1] * 6)
    progress(pool, [news(pool, "a", [2], computed=0)])
    assert (pool.sequence("a").computed, pool.sequence("a").num_tokens) == (6, 7)
