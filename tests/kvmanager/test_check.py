"""check(): each kind of contradiction, planted into the state, is found and named. Nothing else of the pool is used."""

import re

import pytest

from kvmanager import Pool
from kvmanager.prefix_index import NO_BLOCK, Branch
from kvmanager.types import NULL_BLOCK, Append, CacheScope, IndexKind, PoolSpec, Retention
from tests.kvmanager.pools import FakeClock, cache, prefill

LIVE = [1] * 20
"""Blocks 1 (full, named) and 2 (4 tokens) of sequence "live"; then "salted" holds 3 under a salt."""


def busy_pool(index=IndexKind.RADIX):
    """Two live sequences, a cached chain of three (4, 5, 6), and a pinned one of two (7, 8)."""
    pool = Pool(PoolSpec(16, 16, index=index), FakeClock())
    pool.set_quota("s", 4)
    prefill(pool, "live", LIVE)
    prefill(pool, "salted", [1] * 16, scope=CacheScope(salt="s"))
    cache(pool, [3] * 48)
    cache(pool, [4] * 32, retention=Retention(priority=3, pin_seconds=9.0))
    assert pool.check().violations == ()
    return pool


def name(pool, block):
    return pool.block_pool.index.names[block]


def count(pool):
    pool.block_pool.counts[2] = 2


def count_of_a_free_block(pool):
    pool.block_pool.counts[pool.block_pool.free[-1]] = 1


def table_entries(pool):
    pool.table_entries += 1


def null_block_in_a_table(pool):
    pool.live["live"].blocks[1] = NULL_BLOCK


def null_block_named(pool):
    pool.block_pool.index.names[NULL_BLOCK] = b"n"


def held_and_free(pool):
    pool.block_pool.free.append(2)


def twice_free(pool):
    pool.block_pool.free.append(pool.block_pool.free[0])


def in_no_state(pool):
    pool.block_pool.free.pop()


def free_but_stored(pool):
    pool.block_pool.partial[pool.block_pool.free[0]] = 3


def held_sum(pool):
    pool.block_pool.held += 1


def cached_sum(pool):
    pool.block_pool.cached -= 1


def shared_sum(pool):
    pool.block_pool.shared += 1


def references_sum(pool):
    pool.block_pool.references += 1


def stored_sum(pool):
    pool.block_pool.stored_tokens += 1


def flow_of_blocks(pool):
    pool.totals.freed_blocks += 1


def branch_of(pool, block):
    return pool.block_pool.index._branches[block]


def owner_of_another_name(pool):
    heads = pool.block_pool.index._heads
    heads[name(pool, 5)] = heads.pop(name(pool, 4))


def unfindable_name(pool):
    branch_of(pool, 6).blocks.pop()


def branch_without_blocks(pool):
    branch_of(pool, 4).blocks.clear()


def block_of_two_branches(pool):
    branch_of(pool, 4).blocks[2] = 8


def sprout_that_is_none(pool):
    branch_of(pool, 4).sprouts = 1


def two_owners_of_a_name(pool):
    names = pool.block_pool.index.names
    names[6] = names[5]


def spare_that_is_none(pool):
    index = pool.block_pool.index
    index._twins[name(pool, 4)] = [4, 4]


def spare_that_nobody_holds(pool):
    index = pool.block_pool.index
    index._twins[name(pool, 1)] = [1, 6]


def children(pool):
    pool.block_pool.index._children[4] = 2


def children_of_a_free_block(pool):
    pool.block_pool.index._children[9] = 0


def orphan(pool):
    branch = branch_of(pool, 7)
    branch.stem, branch.depth = branch_of(pool, 1), 2
    branch.stem.sprouts = 1


def contents_that_are_left_behind(pool):
    index = pool.block_pool.index
    index._contents[Branch([2], 0, None)] = index._contents[branch_of(pool, 1)]


def contents_of_too_few_blocks(pool):
    pool.block_pool.index._contents[branch_of(pool, 6)].shorten(1)


def no_contents(pool):
    del pool.block_pool.index._contents[branch_of(pool, 6)]


def branches_out_of_order(pool):
    pool.block_pool.index._partings[NO_BLOCK].heads.reverse()


def branch_that_grows_elsewhere(pool):
    partings = pool.block_pool.index._partings
    partings[5] = partings.pop(NO_BLOCK)


def held_behind_a_cached_block(pool):
    branch = branch_of(pool, 1)
    branch.stem, branch.depth = branch_of(pool, 4), 1
    branch.stem.sprouts = 1
    pool.block_pool.index._children[4] = 2


def leaf_that_is_no_victim(pool):
    pool.block_pool.policy.remove(6)


def victim_that_is_continued(pool):
    pool.block_pool.policy.add(5)


def victim_that_is_held(pool):
    pool.block_pool.policy.add(1)


def victim_that_is_pinned(pool):
    pool.block_pool.policy.add(8)


def victim_of_two_orders(pool):
    cache(pool, [5] * 16, retention=Retention(priority=1))
    assert pool.block_pool.kept.members() == [9]
    pool.block_pool.policy.add(9)


def priority_that_counts_for_nothing(pool):
    pool.block_pool.priorities[6] = 1


def victims_of_a_tenant(pool):
    pool.block_pool.tenants.tenant("s").victims.offer(6, 0, 0)


def idle_pins(pool):
    pool.block_pool.pins.idle += 1


def pin_of_a_stranger(pool):
    pool.block_pool.pins.until[2] = 5.0


def pin_of_half_a_chain(pool):
    pool.block_pool.pins.until[6] = 5.0


def priority_of_a_stranger(pool):
    pool.block_pool.priorities[pool.block_pool.free[0]] = 1


def pins_of_a_tenant(pool):
    pool.block_pool.tenants.base.pinned -= 1


def promised_pins(pool):
    pool.promised_pins += 2


def used_by_a_tenant(pool):
    pool.block_pool.tenants.tenant("s").used += 1


def cached_of_a_tenant(pool):
    pool.block_pool.tenants.base.cached += 1


def block_of_another_tenant(pool):
    tenants = pool.block_pool.tenants
    tenants.of_block[2] = tenants.tenant("s")


def more_computed_than_known(pool):
    pool.live["live"].computed = 21


def more_cached_than_computed(pool):
    pool.live["live"].cached = 21


def full_block_of_another_name(pool):
    pool.live["live"].chain.names[0] = b"other"


def tail_that_stores_too_little(pool):
    pool.block_pool.partial[2] = 3
    pool.block_pool.stored_tokens -= 1


@pytest.mark.parametrize(
    ("plant", "sentence"),
    [
        (count, r"block 2 has count 2, but 1 table entries name it \(sequences \['live'\]\)"),
        (count_of_a_free_block, r"block 9 has count 1, but 0 table entries name it \(sequences \[\]\)"),
        (table_entries, "3 block-table entries exist, but 4 are counted"),
        (null_block_in_a_table, "the null block 0 is in a block table"),
        (null_block_named, "the null block 0 is held or named"),
        (held_and_free, "block 2 is 1 times free, its count is 1 and its name none: it must be in exactly one state"),
        (twice_free, "block 15 is 2 times free, its count is 0 and its name none"),
        (in_no_state, "block 9 is 0 times free, its count is 0 and its name none"),
        (free_but_stored, "block 15 stores 3 tokens, but is not held or has a name"),
        (held_sum, "held is kept as 4, but counting gives 3"),
        (cached_sum, "cached is kept as 4, but counting gives 5"),
        (shared_sum, "shared is kept as 1, but counting gives 0"),
        (references_sum, "references is kept as 4, but counting gives 3"),
        (stored_sum, "stored tokens is kept as 37, but counting gives 36"),
        (flow_of_blocks, "allocated \\+ reused - freed is kept as 2, but counting gives 3"),
        (owner_of_another_name, r"the index finds \[4\] under [0-9a-f]{16}, which is not their name"),
        (unfindable_name, "block 6 is named [0-9a-f]{16}, but the index does not have it"),
        (branch_without_blocks, r"the index finds \[\] under [0-9a-f]{16}, which is not their name"),
        (block_of_two_branches, "a block behind block 4 is somewhere else in the index, too"),
        (sprout_that_is_none, "0 branches grow from that of [0-9a-f]{16}, not 1"),
        (two_owners_of_a_name, "7 blocks are found, but under 6 names"),
        (spare_that_is_none, "block 4 is a spare under [0-9a-f]{16} and should not be"),
        (spare_that_nobody_holds, "spare block 6 or its owner is held by nobody"),
        (children, "block 4 has 1 children in the index, but 2 are counted"),
        (children_of_a_free_block, "the children of block 9 are counted, but it is not found"),
        (orphan, r"\[7\] follows a block that the index does not have"),
        (contents_that_are_left_behind, "4 branches have 5 contents, and 4 can be walked to"),
        (contents_of_too_few_blocks, "contents of 2 blocks are kept of block 4 and those behind it"),
        (no_contents, "contents of 0 blocks are kept of block 4 and those behind it"),
        (branches_out_of_order, "block 4 is not found by what it holds behind 0"),
        (branch_that_grows_elsewhere, "block 1 is not found by what it holds behind 0"),
        (held_behind_a_cached_block, "block 1 is held, but the one before it is not"),
        (leaf_that_is_no_victim, "block 6 may be given up but is not offered"),
        (victim_that_is_continued, "block 5 may be given up as the order of victims says but is held, pinned, or"),
        (victim_that_is_held, "block 1 may be given up as the order of victims says but is held, pinned, or"),
        (victim_that_is_pinned, "block 8 may be given up as the order of victims says but is held, pinned, or"),
        (victim_of_two_orders, "the victims with a priority are not those that are kept apart"),
        (priority_that_counts_for_nothing, "the victims with a priority are not those that are kept apart"),
        (victims_of_a_tenant, "a tenant of 1 blocks has other victims than its leaves"),
        (idle_pins, "2 pinned blocks are cached, but 3 are counted"),
        (pin_of_a_stranger, "block 2 is pinned or has a priority, but nobody can find it"),
        (pin_of_half_a_chain, "block 6 is pinned, but the one before it is not"),
        (priority_of_a_stranger, "block 15 is pinned or has a priority, but nobody can find it"),
        (pins_of_a_tenant, "a tenant has 2 pinned blocks that are cached, but 1 are counted"),
        (promised_pins, "sequences will pin 0 blocks, but 2 are counted"),
        (used_by_a_tenant, "a tenant occupies 1 blocks, 0 of them cached, but 2 and 0 are counted"),
        (cached_of_a_tenant, "a tenant occupies 7 blocks, 5 of them cached, but 7 and 6 are counted"),
        (block_of_another_tenant, "sequence 'live' holds block 2 of another tenant"),
        (more_computed_than_known, "sequence 'live' has 0 cached and 21 computed of 20 tokens, and blocks for 32"),
        (more_cached_than_computed, "sequence 'live' has 21 cached and 20 computed of 20 tokens, and blocks for 32"),
        (full_block_of_another_name, "a full block of sequence 'live' is not published under its hash"),
        (tail_that_stores_too_little, "block 2 of sequence 'live' stores less than what is computed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_contradiction_is_found_and_named(plant, sentence):
    pool = busy_pool()
    plant(pool)
    report = pool.check()
    assert not report.ok
    assert any(re.match(sentence, violation) for violation in report.violations), report.violations


def test_a_sound_pool_has_no_contradiction_and_says_what_it_looked_at():
    for index in IndexKind:
        report = busy_pool(index).check()
        assert report.ok
        assert (report.checked_blocks, report.checked_sequences) == (16, 2)


def test_the_sums_show_an_imbalance_without_a_check():
    pool = busy_pool()
    assert pool.imbalance() == 0
    pool.block_pool.free.pop()
    pool.table_entries += 2
    assert pool.imbalance() == 3


def test_checking_changes_nothing():
    pool = busy_pool()
    before = pool.occupancy(), pool.sequences(), pool.lookup([3] * 49)
    pool.check()
    assert (pool.occupancy(), pool.sequences(), pool.lookup([3] * 49)) == before
    pool.append([Append("live", [9], 20)])
    assert pool.check().ok
