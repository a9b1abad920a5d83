"""The KV manager's messages and its dataclasses, translated both ways."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument
from kvmanager.events import EventKind, IndexEvent
from kvmanager.types import (
    Append,
    BlockCopy,
    BlockView,
    CacheScope,
    CheckReport,
    ContentSpan,
    EvictionKind,
    Grant,
    HashAlgorithm,
    IndexKind,
    Occupancy,
    PoolSpec,
    RecentLookups,
    Retention,
    SequenceView,
    Totals,
)

DEFAULT_POOL = "default"

Choice = TypeVar("Choice", bound=Enum)

# The numbers of the wire's enums; 0, unspecified, is the first choice.
_HASHES = (HashAlgorithm.SHA256, HashAlgorithm.SHA256, HashAlgorithm.XXH3)
_INDEXES = (IndexKind.HASH, IndexKind.HASH, IndexKind.RADIX, IndexKind.NONE)
_EVICTIONS = (EvictionKind.ADAPTIVE, EvictionKind.ADAPTIVE, EvictionKind.LRU)


def pool_id_of(pool_id: str) -> str:
    """The pool that a request names; empty means the default one."""
    return pool_id or DEFAULT_POOL


def spec_from_wire(message: pb.PoolSpec) -> PoolSpec:
    """Blocks, tokens and bytes as they are on the wire; the KV manager checks them."""
    return PoolSpec(
        message.num_blocks,
        message.block_size,
        message.bytes_per_block,
        message.model_fingerprint,
        _choice("hash_algorithm", _HASHES, message.hash_algorithm),
        _choice("prefix_index", _INDEXES, message.prefix_index),
        _choice("eviction_policy", _EVICTIONS, message.eviction_policy),
    )


def spec_to_wire(spec: PoolSpec) -> pb.PoolSpec:
    """The facts of a pool."""
    return pb.PoolSpec(
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        bytes_per_block=spec.bytes_per_block,
        model_fingerprint=spec.model_fingerprint,
        hash_algorithm=_number(_HASHES, spec.hash_algorithm),
        prefix_index=_number(_INDEXES, spec.index),
        eviction_policy=_number(_EVICTIONS, spec.eviction),
    )


def scope_from_wire(message: pb.CacheScope) -> CacheScope:
    """Whose cache is meant; an absent message is the base scope."""
    return CacheScope(message.adapter_id, message.adapter_version, message.salt)


def spans_from_wire(messages: Iterable[pb.ContentSpan]) -> list[ContentSpan]:
    """What stands behind tokens, in order."""
    return [ContentSpan(each.content_id, each.offset, each.length) for each in messages]


def retention_from_wire(message: pb.Retention) -> Retention:
    """How to keep what is cached; an absent message is no wish."""
    return Retention(message.priority, message.pin_seconds)


def appends_from_wire(messages: Iterable[pb.SequenceAppend]) -> list[Append]:
    """The news of sequences, in order."""
    return [
        Append(each.sequence_id, list(each.token_ids), each.computed_tokens, each.lookahead_tokens) for each in messages
    ]


def grant_to_wire(grant: Grant) -> pb.SequenceGrant:
    """What one sequence got."""
    return pb.SequenceGrant(
        sequence_id=grant.sequence_id,
        first_index=grant.first_index,
        block_ids=grant.block_ids,
        copies=map(copy_to_wire, grant.copies),
    )


def copy_to_wire(copy: BlockCopy) -> pb.BlockCopy:
    """An order to copy."""
    return pb.BlockCopy(source_block_id=copy.source, target_block_id=copy.target, num_tokens=copy.num_tokens)


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
        pinned_blocks=occupancy.pinned_blocks,
        leased_blocks=occupancy.leased_blocks,
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
        removed_blocks=totals.removed_blocks,
        quota_failures=totals.quota_failures,
        pin_failures=totals.pin_failures,
    )


def recent_to_wire(recent: RecentLookups) -> pb.RecentLookups:
    """The lookups of late."""
    return pb.RecentLookups(lookups=recent.lookups, queried_tokens=recent.queried_tokens, hit_tokens=recent.hit_tokens)


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


def event_to_wire(event: IndexEvent, boot_id: str) -> pb.WatchEventsResponse:
    """One event of a stream."""
    answer = pb.WatchEventsResponse(boot_id=boot_id, number=event.number)
    if event.kind is EventKind.STORED:
        answer.stored.CopyFrom(stored_to_wire(event))
    elif event.kind is EventKind.REMOVED:
        answer.removed.block_hashes.extend(event.names)
    else:
        answer.cleared.SetInParent()
    return answer


def stored_to_wire(event: IndexEvent) -> pb.BlocksStored:
    """A chain of names."""
    return pb.BlocksStored(
        block_hashes=event.names,
        parent_hash=event.parent,
        adapter_id=event.adapter_id,
        adapter_version=event.adapter_version,
    )


def _choice(field: str, choices: tuple[Choice, ...], number: int) -> Choice:
    if not 0 <= number < len(choices):
        raise InvalidArgument(
            f"{field} {number} is none of 0 to {len(choices) - 1}", field=f"spec.{field}", value=number
        )
    return choices[number]


def _number(choices: tuple[Choice, ...], choice: Choice) -> int:
    """The number of a choice on the wire, never that of unspecified."""
    return choices.index(choice, 1)
