"""What a runner that has seen everything would report of a pool, and whether two pools have equal books."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise

from kvmanager.holdings import HeldCache, HeldSequence, Holdings
from kvmanager.pool import Pool
from kvmanager.types import BASE_SCOPE, CacheScope

Block = tuple[CacheScope, Sequence[int]]
"""The scope and the tokens of a full block."""


def holdings_of(pool: Pool, known: Mapping[bytes, Block]) -> Holdings:
    """What is held and cached in a pool; `known` says what each name that can be found stands for."""
    size = pool.spec.block_size
    sequences = [
        HeldSequence(
            sequence.sequence_id,
            sequence.chain.token_ids[:],
            tuple(sequence.blocks),
            sequence.computed,
            sequence.cached,
            sequence.chain.scope,
            sequence.retention,
            sequence.pinned_blocks * size,
            skips_cache_write=sequence.skips_cache_write,
        )
        for sequence in pool.live.values()
    ]
    told = {block for each in sequences for block in each.block_ids[: each.computed_tokens // size]}
    return Holdings(sequences, pool.lease.members(), cached_parts(pool, known, told))


def cached_parts(pool: Pool, known: Mapping[bytes, Block], told: set[int]) -> list[HeldCache]:
    """The findable blocks but those `told`, in paths from the root; the path of the leaf that was used first first."""
    index, counts = pool.block_pool.index, pool.block_pool.counts
    untold = [block for block, name in enumerate(index.names) if name and block not in told]
    untold.sort(key=lambda block: 0 if counts[block] else pool.block_pool.policy.released_at(block) + 1)
    leaves_first = [block for block in untold if not index.num_children(block)]
    parts: list[HeldCache] = []
    done: set[int] = set(told)
    for leaf in [*leaves_first, *untold]:
        path: list[int] = []
        block = leaf
        while block and block not in done:
            path.insert(0, block)
            block = index.parent(block)
        done.update(path)
        if path:
            scope = known[index.names[path[0]]][0]
            tokens = array("I", [token for each in path for token in known[index.names[each]][1]])
            parts.append(HeldCache(scope, path, [index.parent(each) for each in path], tokens))
    return parts


def known_of(prompts: Mapping[CacheScope, Sequence[Sequence[int]]], pool: Pool) -> dict[bytes, Block]:
    """What the names of prompts stand for, by scope."""
    size = pool.spec.block_size
    known: dict[bytes, Block] = {}
    for scope, all_tokens in prompts.items():
        for tokens in all_tokens:
            chain = pool._chain(tokens, scope, ())
            for index in range(len(tokens) // size):
                known[chain.name(index)] = scope, tokens[index * size : (index + 1) * size]
    return known


def of_base(*prompts: Sequence[int]) -> dict[CacheScope, Sequence[Sequence[int]]]:
    return {BASE_SCOPE: prompts}


def assert_equal_books(one: Pool, other: Pool) -> None:
    """Counts, tables, the lease, names with their parents, sums; pins, quotas and totals are another matter."""
    assert other.check().violations == ()
    assert other.imbalance() == 0
    assert other.block_pool.counts == one.block_pool.counts
    assert set(other.lease.members()) == set(one.lease.members())
    assert list(other.live) == list(one.live)
    for key, sequence in one.live.items():
        assert other.live[key].blocks == sequence.blocks
        assert other.live[key].view() == sequence.view()
        assert other.live[key].chain.token_ids == sequence.chain.token_ids
    assert parents(other) == parents(one)
    ours, theirs = one.occupancy(), other.occupancy()
    # A block may store what a sequence computed that holds it no more, and that the others don't say of themselves.
    assert theirs.stored_tokens <= ours.stored_tokens
    assert (theirs.free_blocks, theirs.cached_blocks) == (ours.free_blocks, ours.cached_blocks)


def parents(pool: Pool) -> dict[bytes, bytes]:
    index = pool.block_pool.index
    return {name: index.names[index.parent(block)] for name, block in index.owners().items()}


def assert_given_up_in_the_same_order(one: Pool, other: Pool) -> None:
    """What may be given up is the same, and what was used earlier in one was used earlier in the other."""
    ours, theirs = one.block_pool.policy, other.block_pool.policy
    blocks = sorted(ours.offered(), key=ours.released_at)
    assert sorted(theirs.offered()) == sorted(blocks)
    for earlier, later in pairwise(blocks):
        if ours.released_at(earlier) < ours.released_at(later):
            assert theirs.released_at(earlier) < theirs.released_at(later)
