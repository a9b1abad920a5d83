"""The messages of a Session and what the books take and give, translated both ways."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import chain, compress
from typing import NamedTuple

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import InvalidArgument, KvError
from kvmanager.holdings import HeldCache, HeldSequence
from kvmanager.types import Allocation, BlockCopy, Grant
from services import kv_wire as wire
from services.columns import column_of, from_column, parts, to_column


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
    if columns.taken or message.taken_counts:
        _check_sum(columns.taken_counts, columns.taken, "taken_block_ids")
    return columns


def only(columns: ProgressColumns, chosen: list[bool]) -> ProgressColumns:
    """The chosen entries of the columns."""
    token_ids = parts(columns.token_ids, columns.token_counts)
    taken = parts(columns.taken, columns.taken_counts)
    return ProgressColumns(
        *(array("I", compress(column, chosen)) for column in columns[:6]),
        array("I", chain.from_iterable(compress(token_ids, chosen))),
        array("I", chain.from_iterable(compress(taken, chosen))),
    )


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
    handles: list[int] = []
    first: list[int] = []
    counts: list[int] = []
    blocks: list[int] = []
    copies: list[BlockCopy] = []
    for handle, grant in grants:
        handles.append(handle)
        first.append(grant.first_index)
        counts.append(len(grant.block_ids))
        blocks += grant.block_ids
        copies += grant.copies
    return pb.Grants(
        handles=to_column(handles),
        first_indices=to_column(first),
        counts=to_column(counts),
        block_ids=to_column(blocks),
        copies=map(wire.copy_to_wire, copies),
    )


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
