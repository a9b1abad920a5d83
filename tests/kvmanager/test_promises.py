"""Blocks that can be found before they are computed: who shares them, and what is left when the step fails.

Blocks of 16; PROMPT has 100 tokens, so 6 full blocks and 4 tokens.
"""

from __future__ import annotations

import pytest

from kvmanager import Pool
from kvmanager.errors import InvalidArgument
from kvmanager.events import EventKind
from kvmanager.types import Append, IndexKind, Retention
from tests.kvmanager.pools import end, pool_of, prefill

PROMPT = list(range(100))


def step_of_two(**facts) -> Pool:
    """a computes 100 tokens and b, of the same prompt, the last 4."""
    pool = pool_of(21, **facts)
    assert pool.allocate("a", PROMPT, promised_tokens=100).cached_tokens == 0
    assert pool.allocate("b", PROMPT, promised_tokens=100).cached_tokens == 96
    assert pool.check().violations == ()
    return pool


def found(pool: Pool) -> int:
    return pool.lookup(PROMPT).cached_tokens


def nothing_is_left(pool: Pool) -> bool:
    occupancy = pool.occupancy()
    left = (occupancy.cached_blocks, occupancy.held_blocks, occupancy.stored_tokens, len(pool.block_pool.promised))
    return left == (0, 0, 0, 0) and pool.check().violations == () and not pool.imbalance()


class TestKept:
    def test_by_append(self) -> None:
        pool = step_of_two()
        assert pool.append([Append("a", (), 100), Append("b", (), 100)]) == []
        assert (found(pool), pool.block_pool.promised, pool.check().violations) == (96, set(), ())

    def test_by_free(self) -> None:
        pool = step_of_two()
        pool.free([Append("b", (), 100), Append("a", (), 100)])
        assert (found(pool), pool.occupancy().cached_blocks, pool.check().violations) == (96, 6, ())

    def test_stored_once_when_promised(self) -> None:
        pool = step_of_two()
        pool.append([Append("a", (), 100), Append("b", (), 100)])
        events = pool.events.since(1)
        assert [(event.kind, len(event.names)) for event in events] == [(EventKind.STORED, 6)]

    @pytest.mark.parametrize(("promised", "hit"), [(15, 0), (16, 16), (47, 32), (48, 48), (1 << 40, 96)])
    def test_only_full_blocks_of_what_will_be_computed(self, promised: int, hit: int) -> None:
        pool = pool_of(21)
        pool.allocate("a", PROMPT, promised_tokens=promised)
        assert found(pool) == hit

    def test_counted_from_the_cached_ones_on(self) -> None:
        # 32 are cached, so that 16 more make 48.
        pool = pool_of(21)
        prefill(pool, "first", PROMPT[:33])
        assert pool.allocate("a", PROMPT, promised_tokens=16).cached_tokens == 32
        assert found(pool) == 48

    def test_what_is_cached_already_is_not_promised(self) -> None:
        pool = pool_of(31)
        prefill(pool, "first", PROMPT)
        pool.allocate("a", PROMPT, promised_tokens=100, skip_cache_read=True)
        assert pool.block_pool.promised == set()
        end(pool, "a")
        assert (found(pool), pool.check().violations) == (96, ())

    def test_without_a_prefix_cache(self) -> None:
        pool = pool_of(21, index=IndexKind.NONE)
        pool.allocate("a", PROMPT, promised_tokens=100)
        assert (found(pool), pool.block_pool.promised) == (0, set())


class TestSettling:
    """The next word about a sequence that promised says that it was kept, or ends it."""

    @pytest.mark.parametrize("computed", [0, 1, 95])
    def test_an_append_must_keep_it(self, computed: int) -> None:
        pool = step_of_two()
        with pytest.raises(InvalidArgument, match="promised to compute its first 96 tokens"):
            pool.append([Append("a", (), computed)])
        assert found(pool) == 96

    def test_neither_fork_nor_truncate_comes_first(self) -> None:
        pool = step_of_two()
        with pytest.raises(InvalidArgument, match="promised"):
            pool.fork("a", ["child"])
        with pytest.raises(InvalidArgument, match="promised"):
            pool.truncate("a", 50)
        pool.append([Append("a", (), 96)])
        assert pool.truncate("a", 50) == 3

    def test_numbers_below_0(self) -> None:
        with pytest.raises(InvalidArgument, match="promised_tokens is -1"):
            pool_of().allocate("a", PROMPT, promised_tokens=-1)


class TestWithdrawn:
    @pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
    @pytest.mark.parametrize("order", ["ab", "ba"])
    @pytest.mark.parametrize("calls", [1, 2])
    @pytest.mark.parametrize("pin_seconds", [0.0, 9.0])
    def test_a_step_that_fails(self, index: IndexKind, order: str, calls: int, pin_seconds: float) -> None:
        """Both end with what they had; b says that it has 96 computed tokens, those that it had hit."""
        pool = pool_of(41, index=index)
        for name in "ab":
            pool.allocate(name, PROMPT, promised_tokens=100, retention=Retention(5, pin_seconds))
        words = [Append(name, (), {"a": 0, "b": 96}[name]) for name in order]
        for call in [words] if calls == 1 else [[word] for word in words]:
            pool.free(call)
        assert nothing_is_left(pool)
        assert (found(pool), len(pool.block_pool.pins.until), pool.block_pool.priorities) == (0, 0, {})
        events = pool.events.since(1)
        assert [event.kind for event in events].count(EventKind.REMOVED) == 6

    def test_what_was_computed_stays(self) -> None:
        pool = step_of_two()
        pool.free([Append("a", (), 40), Append("b", (), 96)])
        assert (found(pool), pool.occupancy().cached_blocks, pool.check().violations) == (32, 2, ())

    def test_who_had_hit_it_goes_on_and_publishes_nothing(self) -> None:
        """b has computed what lies before the first block that is gone. It may compute the rest, for itself alone."""
        pool = step_of_two()
        pool.free([Append("a", (), 40)])
        assert pool.sequence("b").view().computed_tokens == 32
        pool.append([Append("b", (7,), 100)])
        assert (found(pool), pool.check().violations) == (32, ())
        pool.free([Append("b", (), 101)])
        assert (found(pool), pool.occupancy().cached_blocks, pool.check().violations) == (32, 2, ())

    def test_what_continues_it_goes_too(self) -> None:
        """c continues b's continuation of a's promise, and was computed and cached before a's word came."""
        pool = pool_of(41)
        pool.allocate("a", PROMPT[:50], promised_tokens=50)
        pool.allocate("b", PROMPT, promised_tokens=100)
        pool.append([Append("b", (), 100)])
        prefill(pool, "c", [*PROMPT[:96], *[5] * 17])
        end(pool, "c")
        assert pool.occupancy().cached_blocks == 1
        pool.free([Append("a", (), 16)])
        assert (found(pool), pool.occupancy().cached_blocks, pool.check().violations) == (16, 0, ())
        end(pool, "b")
        assert (pool.occupancy().cached_blocks, pool.check().violations) == (1, ())

    def test_an_equal_block_loses_its_name_too(self) -> None:
        """Which is more than needed, but what continues the name may have read the one that was never computed."""
        pool = pool_of(41)
        pool.allocate("a", PROMPT[:33], promised_tokens=33)
        prefill(pool, "twin", PROMPT[:33], skip_cache_read=True)
        pool.free([Append("a")])
        assert (found(pool), pool.check().violations) == (0, ())
        end(pool, "twin")
        assert nothing_is_left(pool)

    def test_the_next_one_computes_all(self) -> None:
        pool = step_of_two()
        end(pool, "a", "b")
        assert prefill(pool, "c", PROMPT).cached_tokens == 0
        assert (found(pool), pool.check().violations) == (96, ())


class TestInsideABlock:
    """The index to the token orders copies, which are made before the step."""

    def test_a_promised_block_is_no_source(self) -> None:
        pool = pool_of(21, index=IndexKind.RADIX)
        pool.allocate("a", PROMPT, promised_tokens=100)
        other = [*PROMPT[:40], *[7] * 20]
        allocation = pool.allocate("b", other, promised_tokens=60)
        assert (allocation.cached_tokens, allocation.copies) == (32, ())
        pool.append([Append("a", (), 100), Append("b", (), 60)])
        assert pool.lookup([*PROMPT[:40], *[8] * 20]).cached_tokens == 40

    def test_a_computed_neighbour_is(self) -> None:
        """Of two blocks behind the same 32 tokens the promised one has 8 tokens in common, the computed one 4."""
        pool = pool_of(31, index=IndexKind.RADIX)
        prefill(pool, "first", [*PROMPT[:36], *[99] * 20])
        pool.allocate("a", PROMPT, promised_tokens=100)
        assert pool.lookup([*PROMPT[:40], *[50] * 20]).cached_tokens == 36


class TestTheProof:
    def test_a_promise_that_is_not_counted(self) -> None:
        pool = step_of_two()
        pool.block_pool.promised.pop()
        assert pool.check().violations == ("6 blocks are promised, but 5 are counted, or others",)

    def test_a_promise_that_nobody_finds(self) -> None:
        pool = step_of_two()
        pool.sequence("b").promised_blocks = 7
        (wrong, other) = pool.check().violations
        assert wrong == "a block that sequence 'b' has promised is not found under its hash"
        assert "7 blocks are promised" in other
