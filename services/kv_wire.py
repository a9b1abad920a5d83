"""The KV manager's messages and its dataclasses, translated both ways."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.types import (
    Append,
    BlockView,
    CacheScope,
    CheckReport,
    Grant,
    Occupancy,
    PoolSpec,
    SequenceView,
    Totals,
)

DEFAULT_POOL = "default"


def pool_id_of(pool_id: str) -> str:
    """The pool that a request names; empty means the default one."""
    return pool_id or DEFAULT_POOL


def spec_from_wire(message: pb.PoolSpec) -> PoolSpec:
    """Blocks, tokens and bytes as they are on the wire; the KV manager checks them."""
    return PoolSpec(message.num_blocks, message.block_size, message.bytes_per_block, message.model_fingerprint)


def spec_to_wire(spec: PoolSpec) -> pb.PoolSpec:
    """The facts of a pool."""
    return pb.PoolSpec(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        bytes_per_block=spec.bytes_per_block,
        model_fingerprint=spec.model_fingerprint,
    )


def scope_from_wire(message: pb.CacheScope) -> CacheScope:
    """Whose cache is meant; an absent message is the base scope."""
    return CacheScope(message.adapter_id, message.adapter_version, message.salt)


def appends_from_wire(messages: Iterable[pb.SequenceAppend]) -> list[Append]:
    """The news of sequences, in order."""
    return [Append(each.sequence_id, list(each.token_ids), each.computed_tokens) for each in messages]


def grant_to_wire(grant: Grant) -> pb.SequenceGrant:
    """What one sequence got."""
    copies = [
        pb.BlockCopy(source_block_id=each.source, target_block_id=each.target, num_tokens=each.num_tokens)
        for each in grant.copies
    ]
    return pb.SequenceGrant(
        sequence_id=grant.sequence_id, first_index=grant.first_index, block_ids=grant.block_ids, copies=copies
    )


def occupancy_to_wire(occupancy: Occupancy) -> pb.Occupancy:
    """Blocks by state, and tokens."""
    return pb.Occupancy(
        usable_blocks=occupancy.usable_blocks,
        free_blocks=occupancy.free_blocks,
        cached_blocks=occupancy.cached_blocks,
        held_blocks=occupancy.held_blocks,
        shared_blocks=occupancy.shared_blocks,
        stored_tokens=occupancy.stored_tokens,
        reserved_tokens=occupancy.reserved_tokens,
        sequences=occupancy.sequences,
    )


def totals_to_wire(totals: Totals) -> pb.Totals:
    """Counts since the pool was opened."""
    return pb.Totals(
        allocated_blocks=totals.allocated_blocks,
        reused_blocks=totals.reused_blocks,
        freed_blocks=totals.freed_blocks,
        evicted_blocks=totals.evicted_blocks,
        forks=totals.forks,
        copies=totals.copies,
        queried_tokens=totals.queried_tokens,
        hit_tokens=totals.hit_tokens,
        allocation_failures=totals.allocation_failures,
        unknown_frees=totals.unknown_frees,
    )


def sequence_to_wire(view: SequenceView) -> pb.SequenceInfo:
    """One live sequence."""
    return pb.SequenceInfo(
        sequence_id=view.sequence_id,
        num_tokens=view.num_tokens,
        computed_tokens=view.computed_tokens,
        cached_tokens=view.cached_tokens,
        num_blocks=view.num_blocks,
    )


def block_to_wire(view: BlockView) -> pb.BlockInfo:
    """One entry of a block table."""
    return pb.BlockInfo(
        block_id=view.block_id,
        reference_count=view.reference_count,
        block_hash=view.block_hash,
        stored_tokens=view.stored_tokens,
    )


def check_to_wire(report: CheckReport) -> pb.CheckResponse:
    """The outcome of the self-check."""
    return pb.CheckResponse(
        ok=report.ok,
        violations=report.violations,
        checked_blocks=report.checked_blocks,
        checked_sequences=report.checked_sequences,
    )
