"""One step's work, packed: the tokens of all sequences in a row, without padding, and the maps that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from model_runner.device_copies import Send


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """The next tokens of one sequence: `token_ids` at positions `first_position` and on, with its block table.

    num_logits: how many of them, the last ones, are to be followed by logits. follows: the last of them is not known
    yet, and anything stands in its place: it is the token of this draw of the step before.
    """

    token_ids: Sequence[int]
    first_position: int
    block_table: Sequence[int]
    num_logits: int
    follows: int | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """S sequences with T tokens in all, on the device.

    token_ids, positions, slot_mapping: int64 [T]; slot = block id x block_size + position % block_size.
    query_offsets: int32 [S + 1], where each sequence's tokens begin. sequence_lengths: int32 [S], tokens with K/V once
    the step has run. block_tables: int32 [S, W], padded with the null block. logits_rows: int64 [R], the rows of T
    whose logits are wanted. query_lengths, lengths and host_tables: the same facts on the host.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_offsets: Tensor
    sequence_lengths: Tensor
    block_tables: Tensor
    logits_rows: Tensor
    query_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    host_tables: Tensor


def pack_batch(
    entries: Sequence[BatchEntry], block_size: int, device: torch.device, send: Send | None = None
) -> StepBatch:
    """Packs at least one entry; each must have a token, and a block table with room for its tokens.

    send: brings all to the device, together; by default one by one, and it is waited for.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_rows: list[int] = []
    offsets, lengths = [0], []
    # Most entries are of one token: lists and an array at the end take 0.4 of what a dozen array operations do.
    for entry in entries:
        first, last = entry.first_position, entry.first_position + len(entry.token_ids)
        token_ids += entry.token_ids
        positions += range(first, last)
        slots += [entry.block_table[at // block_size] * block_size + at % block_size for at in range(first, last)]
        logits_rows += range(len(token_ids) - entry.num_logits, len(token_ids))
        offsets.append(len(token_ids))
        lengths.append(last)
    tables = _packed_tables(entries)
    tensors = [
        *(_tensor(each, np.int64) for each in (token_ids, positions, slots)),
        *(_tensor(each, np.int32) for each in (offsets, lengths)),
        tables,
        _tensor(logits_rows, np.int64),
    ]
    if send is not None:
        tensors = send(tensors)
    elif device.type != "cpu":
        tensors = [tensor.to(device) for tensor in tensors]
    return StepBatch(
        *tensors,
        query_lengths=tuple([len(entry.token_ids) for entry in entries]),
        lengths=tuple(lengths),
        host_tables=tables,
    )


def fill_followers(batch: StepBatch, entries: Sequence[BatchEntry], tokens: Tensor, send: Send) -> None:
    """Puts drawn tokens, int64 [R] on the device, to where entries follow them; the host need not know them."""
    ends = accumulate(len(entry.token_ids) for entry in entries)
    pairs = [(end - 1, entry.follows) for end, entry in zip(ends, entries, strict=True) if entry.follows is not None]
    if not pairs:
        return
    rows, draws = send([torch.tensor(column, dtype=torch.int64) for column in zip(*pairs, strict=True)])
    # Where no token was possible, the answer has ended, and nobody looks at what follows.
    batch.token_ids[rows] = tokens[draws].clamp(min=0)


def _tensor(numbers: Sequence[int], dtype: type[np.integer[Any]]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=dtype))


def _packed_tables(entries: Sequence[BatchEntry]) -> Tensor:
    """All block tables, int32 [S, W], which go to the device in one copy."""
    width = max([len(entry.block_table) for entry in entries])
    padding = [0] * width
    packed: list[int] = []
    for entry in entries:
        packed += entry.block_table
        packed += padding[len(entry.block_table) :]
    return _tensor(packed, np.int32).view(len(entries), width)
