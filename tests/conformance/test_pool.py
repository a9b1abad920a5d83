"""vllm-core.md 1b, items 1 to 27, 47, 49, 52 and 53: blocks handed out, shared, cached, reused and given up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from tests.conformance.client import COMMON, Client, refusal

NewPool = Callable[..., Client]


def shared_by_two(pool: Client) -> None:
    """Items 1 and 2: two live sequences that share C."""
    pool.prefill("first", COMMON + [3] * 7)
    pool.prefill("second", COMMON + [3] * 5)


def test_01_cold_prefill(pool: Client) -> None:
    first = pool.allocate("first", COMMON + [3] * 7)
    assert (list(first.block_ids), first.cached_tokens) == ([1, 2, 3, 4], 0)
    # Differs: vLLM names full blocks as it allocates them. Here a block has a name once its tokens are computed, so
    # that nobody can hit what a runner in another process has not written yet.
    assert pool.hashes("first") == ["", "", "", ""]
    pool.append("first", computed=55)
    assert [bool(name) for name in pool.hashes("first")] == [True, True, True, False]
    assert pool.counts("first") == [1, 1, 1, 1]
    names = [block.block_hash for block in pool.table("first")[:3]]
    assert pool.snapshot()[1] == {names[0]: b"", names[1]: names[0], names[2]: names[1]}


def test_02_prefix_shared_with_a_running_sequence(pool: Client) -> None:
    pool.prefill("first", COMMON + [3] * 7)
    second = pool.allocate("second", COMMON + [3] * 5)
    assert (list(second.block_ids), second.cached_tokens) == ([1, 2, 3, 5], 48)
    assert pool.counts("second") == [2, 2, 2, 1]
    assert second.occupancy.free_blocks == 5
    assert second.occupancy.shared_blocks == 3


def test_03_order_of_reuse(pool: Client) -> None:
    shared_by_two(pool)
    pool.free("first")
    pool.free("second")
    assert pool.available == 10
    handed_out = [pool.allocate(f"next{number}", [100 + number] * 16).block_ids[0] for number in range(10)]
    assert handed_out == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]


def test_04_hit_of_blocks_that_nobody_holds(pool: Client) -> None:
    shared_by_two(pool)
    pool.free("first")
    pool.free("second")
    third = pool.allocate("third", COMMON + [3] * 6)
    assert (list(third.block_ids), third.cached_tokens) == ([1, 2, 3, 5], 48)
    assert pool.available == 6


def test_07_reuse_takes_the_hash_away(new_pool: NewPool) -> None:
    pool = new_pool(2)
    pool.cache("first", [7] * 16)
    assert list(pool.lookup([7] * 17).block_ids) == [1]
    assert list(pool.allocate("second", [8] * 15).block_ids) == [1]
    assert pool.hashes("second") == [""]
    assert pool.index_size == 0


def test_09_caching_off(new_pool: NewPool) -> None:
    pool = new_pool(5, 4, prefix_index=pb.PREFIX_INDEX_NONE)
    assert len(pool.cache("first", range(10)).block_ids) == 3
    assert pool.get().occupancy.free_blocks == 4
    second = pool.allocate("second", range(16))
    assert (len(second.block_ids), second.cached_tokens) == (4, 0)
    # Differs in form only: vLLM answers None.
    refused = refusal(lambda: pool.allocate("third", [1] * 4))
    assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "POOL_SHORT")
    # vLLM records nothing of lookups while caching is off (1a.6).
    assert (pool.get().totals.queried_tokens, pool.get().recent_lookups.lookups) == (0, 0)


def test_11_reset(pool: Client) -> None:
    shared_by_two(pool)
    assert [block.block_id for block in pool.table("second")] == [1, 2, 3, 5]
    # Differs in form only: vLLM returns False.
    refused = refusal(pool.reset)
    assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "POOL_BUSY")
    assert (refused.metadata["sequences"], refused.metadata["held_blocks"]) == ("2", "5")
    assert pool.index_size == 3
    pool.free("first", "second")
    last = pool.snapshot()[0]
    assert pool.reset() == 3
    assert pool.index_size == 0
    assert [each.WhichOneof("event") for each in pool.events(last)] == ["cleared"]
    assert (pool.get().occupancy.free_blocks, pool.get().occupancy.cached_blocks) == (10, 0)
    assert pool.lookup([*COMMON, 9]).cached_tokens == 0


def test_13_a_sequence_that_opts_out_of_reads_still_writes(pool: Client) -> None:
    pool.prefill("first", COMMON + [3] * 7)
    second = pool.prefill("second", COMMON + [3] * 5, skip_cache_read=True)
    assert (list(second.block_ids), second.cached_tokens) == ([5, 6, 7, 8], 0)
    assert pool.counts("second") == [1, 1, 1, 1]
    assert pool.hashes("second")[:3] == pool.hashes("first")[:3]
    # As vLLM: of equal blocks, the first one is found.
    assert list(pool.lookup([*COMMON, 9]).block_ids) == [1, 2, 3]
    pool.free("first")
    # Differs: a duplicate is kept only while sequences hold both; vLLM would now keep two cached copies.
    assert list(pool.lookup([*COMMON, 9]).block_ids) == [5, 6, 7]
    assert pool.get().occupancy.cached_blocks == 0


def test_who_skips_the_write_reads_and_leaves_nothing(pool: Client) -> None:
    pool.cache("first", COMMON)
    second = pool.prefill("second", COMMON + [3] * 37, skip_cache_write=True)
    assert second.cached_tokens == len(COMMON)
    pool.free("second")
    assert pool.lookup(COMMON + [3] * 37).cached_tokens == len(COMMON)


def test_15_blocks_are_cached_as_they_fill(new_pool: NewPool) -> None:
    pool = new_pool(11, 4)
    pool.allocate("a", range(14))
    sizes = []
    for computed in (8, 12, 14):
        pool.append("a", computed=computed)
        sizes.append(pool.index_size)
    # The tail of 2 tokens is never found. The half of the item about two groups does not apply: a pool is one group.
    assert sizes == [2, 3, 3]


@pytest.mark.parametrize("usable", [1, 2, 16])
def test_20_drained_and_refilled(new_pool: NewPool, usable: int) -> None:
    pool = new_pool(usable + 1, 4)
    handed_out = [pool.allocate(f"s{number}", [number]).block_ids[0] for number in range(usable)]
    assert handed_out == list(range(1, usable + 1))
    refused = refusal(lambda: pool.allocate("more", [1]))
    assert (refused.code, refused.metadata["available_blocks"]) == ("RESOURCE_EXHAUSTED", "0")
    for number in range(usable):
        pool.free(f"s{number}")
    assert pool.get().occupancy.free_blocks == usable
    # Differs in form: a stack in the place of vLLM's linked list. What comes back last is handed out first, as there.
    again = pool.allocate("all", [5] * 4 * usable)
    assert list(again.block_ids) == list(range(usable, 0, -1))


def test_20_a_hit_leaves_the_middle_of_the_order_of_reuse(new_pool: NewPool) -> None:
    pool = new_pool(4, 4)
    for number in (1, 2, 3):
        pool.cache(f"s{number}", [number] * 4)
    assert pool.prefill("hit", [2] * 5).block_ids[0] == 2
    # The hit took block 2 from between 1 and 3, and its tail gave up 1, the oldest; 3 is left.
    assert (pool.lookup([1] * 5).cached_tokens, pool.lookup([3] * 5).cached_tokens) == (0, 4)
    assert pool.get().occupancy.cached_blocks == 1


@pytest.mark.parametrize("lookahead", [2, 4])
def test_21_lookahead(new_pool: NewPool, lookahead: int) -> None:
    pool = new_pool(11, 4)
    assert len(pool.allocate("a", [1, 2, 3], lookahead_tokens=lookahead).block_ids) == 2
    assert len(pool.allocate("b", [4, 5, 6]).block_ids) == 1


def test_23_an_idle_hit_is_reserved_but_not_allocated(new_pool: NewPool) -> None:
    pool = new_pool(4)
    pool.cache("old", [1] * 16)
    pool.allocate("other", [2] * 16)
    before = pool.get().totals
    # 2 blocks are reserved of the 2 that nobody holds: with one to be left over it is refused, and nothing moves.
    refused = refusal(lambda: pool.allocate("a", [1] * 17, headroom_blocks=1))
    assert (refused.metadata["needed_blocks"], refused.metadata["available_blocks"]) == ("2", "2")
    assert pool.available == 2
    assert pool.allocate("a", [1] * 17).cached_tokens == 16
    after = pool.get().totals
    assert after.allocated_blocks - before.allocated_blocks == 1
    assert after.reused_blocks - before.reused_blocks == 1


def test_24_demand_counts_idle_hits(new_pool: NewPool) -> None:
    pool = new_pool(25)
    tokens = list(range(320))
    pool.cache("old", tokens[:160])
    refused = refusal(lambda: pool.allocate("a", tokens, headroom_blocks=5))
    assert refused.metadata["needed_blocks"] == "20"
    # Hits that are held already take nothing from the free list.
    pool.prefill("holder", tokens[:161])
    refused = refusal(lambda: pool.allocate("a", tokens, headroom_blocks=4))
    assert (refused.metadata["needed_blocks"], refused.metadata["available_blocks"]) == ("10", "13")
    # The half of the item about null blocks does not apply: there is no sliding window, so no table has any.


@pytest.mark.parametrize("num_tokens", [4, 8, 12, 16])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_25_what_is_predicted_is_what_is_taken(new_pool: NewPool, num_tokens: int, block_size: int) -> None:
    pool = new_pool(11, block_size)
    predicted = refusal(lambda: pool.allocate("a", [1] * num_tokens, headroom_blocks=10)).metadata["needed_blocks"]
    taken = pool.allocate("a", [1] * num_tokens)
    assert len(taken.block_ids) == int(predicted) == taken.occupancy.held_blocks


def test_26_the_null_block_is_never_handed_out(new_pool: NewPool) -> None:
    pool = new_pool(6, 4)
    seen: set[int] = set()
    for turn in range(4):
        seen.update(pool.prefill("a", [turn] * 20).block_ids)
        assert pool.get().occupancy.free_blocks == 0
        assert pool.lookup([turn] * 21).partial_block_id == 0
        pool.free("a")
        if turn % 2:
            pool.reset()
        assert pool.check().checked_blocks == 6
        assert list(pool.check().violations) == []
    assert seen == {1, 2, 3, 4, 5}
    assert pool.get().occupancy.usable_blocks == 5


def test_27_no_leak(new_pool: NewPool) -> None:
    pool = new_pool(11, 4)
    for number in range(5):
        name = f"request{number}"
        pool.prefill(name, [number] * 10)
        for token in range(10):
            pool.append(name, [token], computed=10 + token)
        pool.free(name, computed=20)
    listed = pool.stub.ListSequences(pb.ListSequencesRequest(pool_id=pool.pool_id))
    assert list(listed.sequences) == []
    shown = pool.get()
    assert (shown.occupancy.held_blocks, shown.occupancy.shared_blocks, pool.available) == (0, 0, 10)
    assert shown.totals.allocated_blocks + shown.totals.reused_blocks == shown.totals.freed_blocks == 25


def test_47_equal_prompts_of_one_step(new_pool: NewPool) -> None:
    """Two prompts of 100 tokens take 100 and 4 tokens of one step. Differs: who allocates must promise to compute."""
    pool = new_pool(31)
    prompt = list(range(100))
    first = pool.allocate("first", prompt, promised_tokens=100)
    second = pool.allocate("second", prompt, promised_tokens=100)
    assert [100 - answer.cached_tokens for answer in (first, second)] == [100, 4]
    assert (list(second.block_ids), pool.counts("second")) == ([1, 2, 3, 4, 5, 6, 8], [2] * 6 + [1])
    for name in ("first", "second"):
        pool.append(name, computed=100)
    for number in range(3):
        assert pool.allocate(f"later{number}", prompt, promised_tokens=4).cached_tokens == 96


def test_47_a_step_that_never_ran(new_pool: NewPool) -> None:
    """A promise that ends uncomputed is forgotten, also by who had hit it."""
    pool = new_pool(31)
    prompt = list(range(100))
    pool.allocate("first", prompt, promised_tokens=100)
    assert pool.allocate("second", prompt).cached_tokens == 96
    pool.free("first")
    assert pool.lookup([*prompt, 100]).cached_tokens == 0
    pool.free("second", computed=100)
    assert (pool.lookup([*prompt, 100]).cached_tokens, pool.index_size, pool.available) == (0, 0, 30)


def test_49_a_token_that_is_told_is_not_yet_computed(new_pool: NewPool) -> None:
    pool = new_pool(11, 1)
    pool.prefill("first", [0, 1])
    pool.append("first", [2], computed=2)
    assert pool.lookup([0, 1, 2, 3]).cached_tokens == 2
    pool.append("first", [3], computed=3)
    assert pool.lookup([0, 1, 2, 3]).cached_tokens == 3


def test_52_headroom(pool: Client) -> None:
    # vLLM reserves beside the first chunk of 16 tokens: 4 fit beside it, 10 don't.
    refused = refusal(lambda: pool.allocate("chunk", [1] * 16, headroom_blocks=10))
    assert (refused.code, refused.metadata["headroom_blocks"]) == ("RESOURCE_EXHAUSTED", "10")
    assert len(pool.allocate("chunk", [1] * 16, headroom_blocks=4).block_ids) == 1
    pool.free("chunk")
    # Differs: Octavo allocates the whole prompt at once, so of 128 tokens (8 blocks of 10) 2 blocks are left.
    assert refusal(lambda: pool.allocate("whole", [1] * 128, headroom_blocks=3)).reason == "POOL_SHORT"
    assert len(pool.allocate("whole", [1] * 128, headroom_blocks=2).block_ids) == 8


def test_53_a_prompt_that_never_fits(new_pool: NewPool) -> None:
    # Differs: vLLM answers None, as if it could fit later; a client that retries would wait for ever (issue 35541).
    pool = new_pool(5)
    refused = refusal(lambda: pool.allocate("a", [1] * 256))
    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "NEVER_FITS")
    assert (refused.metadata["needed_blocks"], refused.metadata["usable_blocks"]) == ("16", "4")


def test_differs_fork_shares_the_partial_tail(pool: Client) -> None:
    # vLLM has no fork: its n > 1 are independent requests. Here the first writer of a shared tail gets one copy.
    pool.prefill("parent", [1] * 20)
    forked: Any = pool.stub.Fork(pb.ForkRequest(pool_id=pool.pool_id, parent_id="parent", child_ids=["child"]))
    assert (list(forked.block_ids), pool.counts("child")) == ([1, 2], [2, 2])
    grant = pool.append("child", [9], computed=20).grants[0]
    assert list(grant.copies) == [pb.BlockCopy(source_block_id=2, target_block_id=3, num_tokens=4)]
    assert (pool.counts("child"), pool.counts("parent")) == ([2, 1], [2, 1])


def test_differs_a_second_free_is_counted_and_harmless(pool: Client) -> None:
    # vLLM lets a reference count go to -1 (1a.1, 8). Here the second free finds no sequence.
    shared_by_two(pool)
    assert pool.free("first").freed_sequences == 1
    again = pool.free("first")
    assert (again.freed_sequences, again.unknown_sequences) == (0, 1)
    assert pool.counts("second") == [1, 1, 1, 1]


@pytest.mark.parametrize("policy", [pb.EVICTION_POLICY_LRU, pb.EVICTION_POLICY_ADAPTIVE])
def test_differs_no_block_is_given_up_before_those_that_continue_it(new_pool: NewPool, policy: int) -> None:
    # In vLLM this follows from the order of the free list. Here it is a rule of its own, whatever the policy thinks.
    pool = new_pool(6, 4, eviction_policy=policy)
    pool.cache("long", range(16))
    pool.cache("short", range(5))
    left = []
    for number in range(5):
        pool.allocate(f"other{number}", [50 + number])
        left.append(pool.lookup(range(17)).cached_tokens)
    # The first takes the block that is free, each further one gives up the last block of the chain that is left.
    assert left == [16, 12, 8, 4, 0]
