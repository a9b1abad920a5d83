"""The messages of a Session and what the books take and give, translated both ways."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, KvError
from kvmanager.holdings import HeldCache, HeldSequence
from kvmanager.types import Allocation, Grant
from services import kv_wire as wire
from services.columns import column_of, from_column, to_column


class ProgressColumns(NamedTuple):
    """A Progress, column by column; `token_ids` and `taken` are cut by the counts."""

    handles: array[int]
    token_counts: array[int]
    computed: array[int]
    entries: array[int]
    taken_counts: array[int]
    asks: array[int]
    token_ids: array[int]
    taken: array[int]


def progress_from_wire(message: pb.Progress) -> ProgressColumns:
    """Raises InvalidArgument for columns that don't fit each other."""
    handles = from_column(message.handles, "handles")
    count = len(handles)
    columns = ProgressColumns(
        handles,
        column_of(message.token_counts, "token_counts", count),
        column_of(message.computed_tokens, "computed_tokens", count),
        column_of(message.table_counts, "table_counts", count),
        column_of(message.taken_counts, "taken_counts", count),
        column_of(message.asks, "asks", count),
        from_column(message.token_ids, "token_ids"),
        from_column(message.taken_block_ids, "taken_block_ids"),
    )
    _check_sum(columns.token_counts, columns.token_ids, "token_ids")
    _check_sum(columns.taken_counts, columns.taken, "taken_block_ids")
    return columns


def held_sequence_from_wire(message: pb.HeldSequence) -> HeldSequence:
    """A live sequence, as its runner knows it."""
    return HeldSequence(
        message.sequence_id,
        from_column(message.token_ids, "token_ids"),
        from_column(message.block_ids, "block_ids"),
        message.computed_tokens,
        message.cached_tokens,
        wire.scope_from_wire(message.scope),
        wire.retention_from_wire(message.retention),
        message.prompt_tokens,
        message.promised_tokens,
        message.skip_cache_write,
    )


def held_cache_from_wire(message: pb.CachedBlocks) -> HeldCache:
    """Cached blocks of one scope; whether the columns fit each other is for the books to say."""
    return HeldCache(
        wire.scope_from_wire(message.scope),
        from_column(message.block_ids, "block_ids"),
        from_column(message.parent_block_ids, "parent_block_ids"),
        from_column(message.token_ids, "token_ids"),
    )


def grants_to_wire(grants: Iterable[tuple[int, Grant]]) -> pb.Grants:
    """Changed block tables, each with the handle of its sequence, in columns."""
    handles, first, counts, blocks = array("I"), array("I"), array("I"), array("I")
    message = pb.Grants()
    for handle, grant in grants:
        handles.append(handle)
        first.append(grant.first_index)
        counts.append(len(grant.block_ids))
        blocks.extend(grant.block_ids)
        message.copies.extend(map(wire.copy_to_wire, grant.copies))
    message.handles, message.first_indices = to_column(handles), to_column(first)
    message.counts, message.block_ids = to_column(counts), to_column(blocks)
    return message


def admitted_to_wire(handle: int, allocation: Allocation) -> pb.Admitted:
    """A sequence that has begun."""
    return pb.Admitted(
        handle=handle,
        block_ids=to_column(allocation.block_ids),
        cached_tokens=allocation.cached_tokens,
        copies=map(wire.copy_to_wire, allocation.copies),
    )


def refusal_to_wire(handle: int, error: KvError) -> pb.Refusal:
    """Why something was not carried out."""
    return pb.Refusal(handle=handle, reason=error.reason, sentence=str(error))


def _check_sum(counts: array[int], numbers: array[int], name: str) -> None:
    if (total := sum(counts)) != len(numbers):
        raise InvalidArgument(
            f"column {name} has {len(numbers)} entries, and the counts beside it say {total}",
            entries=len(numbers),
            field=name,
        )
