"""truncate(): what a rewound sequence keeps, and that its later writes touch nobody else's data."""

import pytest

from kvmanager import Pool
from kvmanager.errors import InvalidArgument, PoolShort, UnknownSequence
from kvmanager.types import Append, BlockCopy, ContentSpan, Grant, IndexKind, PoolSpec, Retention
from tests.kvmanager.pools import COMMON, FakeClock, cache, end, pool_of, prefill, right


def test_a_rewind_drops_whole_blocks_and_keeps_them_cached():
    pool = pool_of()
    prefill(pool, "a", [*COMMON, 9])
    assert pool.truncate("a", 20) == 2
    assert [view.block_id for view in pool.block_table("a")[1]] == [1, 2]
    assert (pool.sequence("a").num_tokens, pool.sequence("a").computed) == (20, 20)
    assert pool.occupancy().held_blocks == 2
    assert pool.occupancy().cached_blocks == 1
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    assert right(pool)


def test_a_rewind_to_where_it_is_changes_nothing():
    pool = pool_of()
    prefill(pool, "a", [1] * 20)
    assert pool.truncate("a", 20) == 0
    assert pool.occupancy().stored_tokens == 20
    assert pool.append([Append("a", [2], 20)]) == []


def test_a_rewound_tail_stores_less():
    pool = pool_of()
    prefill(pool, "a", [1] * 30)
    assert pool.truncate("a", 20) == 0
    assert pool.occupancy().stored_tokens == 20
    pool.append([Append("a", [2] * 4, 20)])
    pool.append([Append("a", (), 24)])
    assert pool.occupancy().stored_tokens == 24
    assert right(pool)


def test_uncomputed_tokens_are_rewound_too():
    pool = pool_of()
    pool.allocate("a", [1] * 40, lookahead_tokens=30)
    pool.append([Append("a", (), 5)])
    assert pool.truncate("a", 17) == 3
    assert (pool.sequence("a").num_tokens, pool.sequence("a").computed) == (17, 5)
    assert pool.occupancy().stored_tokens == 5


def test_the_last_block_of_a_prompt_is_taken_out_of_the_index_for_the_next_write():
    pool = pool_of()
    prefill(pool, "a", [1] * 32)
    pool.truncate("a", 20)
    assert pool.lookup([1] * 33).cached_tokens == 32
    assert pool.append([Append("a", [2], 20)]) == []
    assert pool.lookup([1] * 33).cached_tokens == 16
    assert pool.occupancy().stored_tokens == 20
    assert right(pool)


def test_a_block_that_others_continue_is_copied_before_the_next_write():
    pool = pool_of()
    prefill(pool, "a", COMMON)
    pool.truncate("a", 20)
    assert pool.append([Append("a", [5], 20)]) == [Grant("a", 1, (4,), (BlockCopy(2, 4, 4),))]
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48
    assert right(pool)


def test_a_block_that_another_sequence_hit_is_copied_before_the_next_write():
    pool = pool_of()
    prefill(pool, "a", [1] * 32)
    prefill(pool, "b", [1] * 32 + [3])
    pool.truncate("a", 20)
    assert pool.append([Append("a", [5], 20)]) == [Grant("a", 1, (4,), (BlockCopy(2, 4, 4),))]
    assert pool.lookup([1] * 33).block_ids == (1, 2)


def test_a_copy_for_a_rewound_sequence_counts_as_a_needed_block():
    pool = pool_of(num_blocks=4)
    prefill(pool, "a", COMMON)
    pool.fork("a", ["b"])
    pool.truncate("a", 20)
    with pytest.raises(PoolShort, match="1 blocks are needed, 0 are free or cached"):
        pool.append([Append("a", [5], 20)])
    assert pool.sequence("a").num_tokens == 20
    assert pool.lookup([*COMMON, 9]).cached_tokens == 48


def test_what_a_rewound_sequence_computed_unasked_is_refused():
    pool = pool_of()
    prefill(pool, "a", [1] * 32)
    pool.truncate("a", 20)
    with pytest.raises(InvalidArgument, match="after a fork or a truncate, append before the next write"):
        pool.append([Append("a", [5] * 12, 32)])
    with pytest.raises(InvalidArgument, match="computed tokens in block 2"):
        pool.free([Append("a", [5] * 12, 32)])
    assert pool.lookup([1] * 20 + [5] * 13).cached_tokens == 16


def test_a_forked_child_rewinds_alone():
    pool = pool_of()
    prefill(pool, "p", [1] * 40)
    pool.fork("p", ["c"])
    assert pool.truncate("c", 10) == 2
    assert pool.sequence("p").num_tokens == 40
    assert pool.append([Append("c", [2], 10)]) == [Grant("c", 0, (4,), (BlockCopy(1, 4, 10),))]
    assert pool.lookup([1] * 33).block_ids == (1, 2)


@pytest.mark.parametrize("num_tokens", [-1, 0, 21])
def test_a_rewind_to_no_token_or_forward_is_refused(num_tokens):
    pool = pool_of()
    prefill(pool, "a", [1] * 20)
    with pytest.raises(InvalidArgument, match=f"has 20 tokens and can be rewound to 1 to as many, not to {num_tokens}"):
        pool.truncate("a", num_tokens)
    with pytest.raises(UnknownSequence):
        pool.truncate("b", 1)
    assert pool.sequence("a").num_tokens == 20


def test_equal_blocks_rewound_in_one_call_need_a_copy_for_the_last():
    """Both could lose their name while the other has it; not both at once, for a cached block continues it."""
    pool = pool_of(num_blocks=6)
    pool.allocate("a", [1] * 16)
    pool.allocate("b", [1] * 16)
    pool.append([Append("a", (), 16), Append("b", (), 16)])
    prefill(pool, "child", [1] * 16 + [2] * 17)
    end(pool, "child")
    assert pool.occupancy().cached_blocks == 1
    pool.truncate("a", 10)
    pool.truncate("b", 10)
    pool.allocate("rest", [7] * 32)
    assert pool.occupancy().free_blocks == 0
    grants = pool.append([Append("a", [3], 10), Append("b", [3], 10)])
    assert [(grant.sequence_id, len(grant.copies)) for grant in grants] == [("b", 1)]
    assert right(pool)


def test_a_copy_that_becomes_needed_within_one_call_is_counted():
    """The second rewound block is the last of its name, and continued, once the first has lost its own."""
    pool = pool_of(num_blocks=5)
    cache(pool, [9] * 16)
    pool.allocate("a", [1] * 16)
    pool.allocate("b", [1] * 16)
    pool.append([Append("a", (), 16), Append("b", (), 16)])
    cache(pool, [1] * 16 + [2] * 16)
    assert pool.occupancy().cached_blocks == 2
    pool.truncate("a", 10)
    pool.truncate("b", 10)
    with pytest.raises(PoolShort, match="3 blocks are needed, 2 are free or cached"):
        pool.append([Append("a", [3] * 7, 10), Append("b", [3] * 7, 10)])
    assert [view.num_tokens for view in pool.sequences()] == [10, 10]
    assert pool.lookup([9] * 17).cached_tokens == 16
    assert right(pool)


def test_room_to_look_ahead_is_the_sequences_own():
    """All is computed, but the runner may write the room behind the known tokens: forked ones may not share it."""
    pool = pool_of()
    prefill(pool, "p", [1] * 10)
    pool.fork("p", ["c"])
    grants = pool.append([Append("p", (), 10, 4), Append("c", (), 10, 4)])
    assert grants == [Grant("p", 0, (2,), (BlockCopy(1, 2, 10),))]
    pool.append([Append("p", [3], 11), Append("c", [4], 11)])
    assert pool.sequence("p").blocks != pool.sequence("c").blocks


def test_a_pinned_block_is_not_rewritten_by_the_last_that_holds_it():
    clock = FakeClock()
    pool = Pool(PoolSpec(11, 16), clock)
    cache(pool, [1] * 32, retention=Retention(pin_seconds=10.0))
    prefill(pool, "a", [1] * 33)
    pool.truncate("a", 20)
    assert pool.append([Append("a", [2], 20)])[0].copies == (BlockCopy(2, 3, 4),)
    assert pool.lookup([1] * 33).cached_tokens == 32
    assert pool.occupancy().pinned_blocks == 1
    assert right(pool)


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
class TestSpans:
    """What was rewound is gone, the image behind it too: equal tokens told later are just tokens."""

    def test_a_span_that_was_rewound_names_nothing_any_more(self, index):
        pool = pool_of(index=index)
        span = ContentSpan("cat", 4, 8)
        prefill(pool, "a", [5] * 16, spans=[span])
        pool.truncate("a", 4)
        pool.append([Append("a", [5] * 12, 4)])
        pool.append([Append("a", [5], 16)])
        assert pool.lookup([5] * 17).cached_tokens == 16
        assert pool.lookup([5] * 17, spans=[span]).cached_tokens == 0

    def test_the_rest_of_a_span_is_neither_the_span_nor_plain_tokens(self, index):
        pool = pool_of(index=index)
        span = ContentSpan("cat", 4, 24)
        prefill(pool, "a", [5] * 32, spans=[span])
        pool.truncate("a", 20)
        pool.append([Append("a", [5] * 12, 20)])
        pool.append([Append("a", [5], 32)])
        assert pool.lookup([5] * 33).cached_tokens == 0
        assert pool.lookup([5] * 33, spans=[span]).cached_tokens == 16
        assert right(pool)

    def test_blocks_before_the_cut_are_published_as_what_they_were(self, index):
        """A span of tokens 4 to 43, cut at 36 before anything is computed: blocks 0 and 1 still hold its beginning."""
        pool = pool_of(index=index)
        span = ContentSpan("cat", 4, 40)
        pool.allocate("a", [5] * 48, spans=[span])
        pool.truncate("a", 36)
        pool.append([Append("a", (), 36)])
        assert pool.lookup([5] * 48, spans=[span]).cached_tokens == 32
        assert pool.lookup([5] * 48).cached_tokens == 0
        pool.append([Append("a", [5] * 12, 36)])
        pool.append([Append("a", [5], 48)])
        assert pool.lookup([5] * 48, spans=[span]).cached_tokens == 32
        assert right(pool)
