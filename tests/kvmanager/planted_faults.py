"""Faults of the kinds that books of blocks are known to have, each planted by a patch: the machine must find them."""

from __future__ import annotations

from dataclasses import replace

from kvmanager import restore
from kvmanager.blocks import BlockPool
from kvmanager.errors import PoolShort
from kvmanager.events import EventLog
from kvmanager.hashing import HashChain
from kvmanager.lease import Lease
from kvmanager.pool import Pool
from kvmanager.prefix_index import NO_BLOCK, PrefixIndex
from kvmanager.radix_index import RadixIndex
from kvmanager.requests import Requests
from kvmanager.restore import RestorablePool

by_use = restore._by_use


def count_off_by_one_on_fork(patch):
    real = BlockPool.share
    patch.setattr(BlockPool, "share", lambda self, blocks, times=1: real(self, blocks, max(1, times - 1)))


def hash_left_behind_on_reuse(patch):
    patch.setattr(PrefixIndex, "withdraw_leaves", lambda self, blocks: NO_BLOCK)


def hit_evicted_in_the_same_call(patch):
    """Takes the fresh blocks before the hits are held, as one system did with two groups."""
    hits = []
    real_hit, real_take = BlockPool.hit, BlockPool.take

    def take(self, count, tenant):
        blocks = real_take(self, count, tenant)
        while hits:
            real_hit(self, hits.pop())
        return blocks

    patch.setattr(BlockPool, "hit", lambda self, blocks: hits.append(blocks))
    patch.setattr(BlockPool, "take", take)


def tail_freed_twice(patch):
    real = Pool._end

    def end(self, sequence):
        tail = sequence.blocks[-1]
        real(self, sequence)
        if self.block_pool.counts[tail] > 0:
            self.block_pool.release([tail])

    patch.setattr(Pool, "_end", end)


def failed_allocation_keeps_a_touch(patch):
    real = Pool.allocate

    def allocate(self, sequence_id, token_ids, **options):
        try:
            return real(self, sequence_id, token_ids, **options)
        except PoolShort:
            self.block_pool.share(self._match(self._chain(token_ids, options["scope"], options["spans"])))
            raise

    patch.setattr(Pool, "allocate", allocate)


def copy_left_out(patch):
    """A forked sequence, or one that was rewound, goes on writing where it did."""
    patch.setattr(Requests, "_foreign_writes", lambda *arguments: ([], 0))


def rewound_block_stays_published(patch):
    patch.setattr(BlockPool, "unpublish", lambda self, block, num_tokens: None)


def rewound_block_is_copied_no_more_than_unpublished(patch):
    """Its only holder takes the name of a block that others continue."""
    patch.setattr(BlockPool, "can_unpublish", lambda self, block, withdrawn=0: True)


def rewound_span_still_names_blocks(patch):
    def truncate(self, num_tokens):
        del self.token_ids[num_tokens:]
        del self.names[num_tokens // self._block_size :]

    patch.setattr(HashChain, "truncate", truncate)


def names_lost_in_one_call_counted_once(patch):
    real = BlockPool.can_unpublish
    patch.setattr(BlockPool, "can_unpublish", lambda self, block, withdrawn=0: real(self, block))


def victim_that_is_no_leaf(patch):
    real = BlockPool._cache

    def cache(self, blocks):
        real(self, blocks)
        for block in blocks:
            self.policy.add(block)

    patch.setattr(BlockPool, "_cache", cache)


def priority_ignored(patch):
    patch.setattr(BlockPool, "_enter", lambda self, block, tenant: self.policy.add(block))


def pin_ignored_by_eviction(patch):
    def offer_leaf(self, block):
        if block and not self.counts[block] and not self.index.num_children(block):
            self._enter(block, self.tenants.owner(block))

    patch.setattr(BlockPool, "_offer_leaf", offer_leaf)


def pin_lost_to_a_rewound_holder(patch):
    def can_unpublish(self, block, withdrawn=0):
        name = self.index.names[block]
        return self.index.num_blocks(name) - withdrawn > 1 or not self.index.num_children(self.index.owner(block))

    patch.setattr(BlockPool, "can_unpublish", can_unpublish)


def quota_not_counted_on_append(patch):
    patch.setattr(Requests, "_check_plans", lambda self, plans: self._check_available(sum(p[-1] for p in plans), 0))


def event_left_out_on_eviction(patch):
    real = BlockPool._evict

    def evict(self, count, tenant=None):
        with patch.context() as within:
            within.setattr(EventLog, "removed", lambda self, names: None)
            real(self, count, tenant)

    patch.setattr(BlockPool, "_evict", evict)


def parent_event_before_its_child(patch):
    real = EventLog.removed
    patch.setattr(EventLog, "removed", lambda self, names: real(self, names[::-1]))


def radix_branch_left_behind_on_eviction(patch):
    def leaving(self, branch, count):
        if count < len(branch.blocks):
            self._contents[branch].shorten(count)

    patch.setattr(RadixIndex, "_leaving", leaving)


def radix_contents_left_behind_on_eviction(patch):
    real = RadixIndex._leaving
    patch.setattr(
        RadixIndex,
        "_leaving",
        lambda self, *leaving: real(self, *leaving) if leaving[1] == len(leaving[0].blocks) else None,
    )


def promoted_spare_loses_the_children(patch):
    def hand_over(self, owner, heir):
        branch = self._branches[heir] = self._branches[owner]
        branch.blocks[branch.blocks.index(owner)] = heir

    patch.setattr(PrefixIndex, "_hand_over", hand_over)


def partial_match_of_one_token_too_many(patch):
    real = RadixIndex.match_inside

    def match_inside(self, chain, blocks, max_tokens, hidden=frozenset()):
        block, tokens = real(self, chain, blocks, max_tokens, hidden)
        return block, tokens + 1 if block else 0

    patch.setattr(RadixIndex, "match_inside", match_inside)


def partial_copy_left_out(patch):
    """Only the runner's data shows it: the answer says that the tokens are cached."""
    patch.setattr(Pool, "_copy_partial", lambda self, source, num_tokens, target: ())


def promise_not_withdrawn(patch):
    """A step that fails leaves names of blocks that hold nothing."""
    patch.setattr(Pool, "_withdraw", lambda self, sequence: None)


def reader_publishes_what_was_withdrawn(patch):
    real = Pool._taint

    def taint(self, holder, gone):
        publishable = holder.publishable
        real(self, holder, gone)
        holder.publishable = publishable

    patch.setattr(Pool, "_taint", taint)


def rewound_sequence_publishes_what_was_to_be_left_out(patch):
    def limit_publishing(self, sequence, kept_blocks):
        if kept_blocks <= sequence.publishable:
            sequence.publishable = self._publishable

    patch.setattr(Pool, "_limit_publishing", limit_publishing)


def rewound_below_its_hits_publishes_in_their_place(patch):
    real = Pool._limit_publishing

    def limit_publishing(self, sequence, kept_blocks):
        if not sequence.skips_cache_write:
            real(self, sequence, kept_blocks)

    patch.setattr(Pool, "_limit_publishing", limit_publishing)


def restored_sequence_publishes_what_was_to_be_left_out(patch):
    real = RestorablePool._restore_sequence

    def restore_sequence(self, held, chain, caller):
        real(self, replace(held, skips_cache_write=False), chain, caller)

    patch.setattr(RestorablePool, "_restore_sequence", restore_sequence)


def part_of_a_promised_block_copied(patch):
    real = RadixIndex.match_inside
    patch.setattr(
        RadixIndex, "match_inside", lambda self, chain, blocks, most, hidden=(): real(self, chain, blocks, most, set())
    )


def taken_block_left_in_the_lease(patch):
    patch.setattr(Lease, "remove", lambda self, blocks: None)


def restored_block_without_its_count(patch):
    """The second holder of a shared block is not counted."""
    real = RestorablePool._restore_sequence

    def restore_sequence(self, held, chain, caller):
        counts = self.block_pool.counts[:]
        real(self, held, chain, caller)
        for block in held.block_ids:
            self.block_pool.counts[block] = counts[block] or 1

    patch.setattr(RestorablePool, "_restore_sequence", restore_sequence)


def restored_cache_in_the_wrong_order(patch):
    patch.setattr(restore, "_by_use", lambda cached, idle: list(reversed(by_use(cached, idle))))


FAULTS = [
    count_off_by_one_on_fork,
    hash_left_behind_on_reuse,
    tail_freed_twice,
    failed_allocation_keeps_a_touch,
    copy_left_out,
    rewound_block_stays_published,
    rewound_block_is_copied_no_more_than_unpublished,
    rewound_span_still_names_blocks,
    victim_that_is_no_leaf,
    priority_ignored,
    pin_ignored_by_eviction,
    event_left_out_on_eviction,
    parent_event_before_its_child,
    radix_branch_left_behind_on_eviction,
    radix_contents_left_behind_on_eviction,
    promoted_spare_loses_the_children,
    partial_match_of_one_token_too_many,
    promise_not_withdrawn,
    taken_block_left_in_the_lease,
    restored_block_without_its_count,
]
"""What the machine finds within seconds. The eleven that are left out take it longer: each is shown in a history."""
