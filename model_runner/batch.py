"""One step's work, packed: the tokens of all sequences in a row, without padding, and the maps that go with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

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
    counts = np.array([len(entry.token_ids) for entry in entries], dtype=np.int64)
    firsts = np.array([entry.first_position for entry in entries], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    rows = np.repeat(np.arange(len(entries)), counts)
    positions = np.arange(offsets[-1]) - offsets[rows] + firsts[rows]
    tables = _pack_tables(entries)
    slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    lengths = firsts + counts
    wanted = np.array([entry.num_logits for entry in entries], dtype=np.int64)
    arrays = (
        _concatenate(entries, offsets[-1]),
        positions,
        slots,
        offsets.astype(np.int32),
        lengths.astype(np.int32),
        tables,
        _last_rows(offsets[1:], wanted),
    )
    tensors = [torch.from_numpy(array) for array in arrays]
    return StepBatch(
        *([tensor.to(device) for tensor in tensors] if send is None else send(tensors)),
        query_lengths=tuple(counts.tolist()),
        lengths=tuple(lengths.tolist()),
        host_tables=torch.from_numpy(tables),
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


def _last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The last `counts` rows before each of `ends`, ascending; both int64 [S]."""
    before = np.repeat(ends - counts, counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return before + within


def _concatenate(entries: Sequence[BatchEntry], total: int) -> np.ndarray:
    return np.fromiter(chain.from_iterable(entry.token_ids for entry in entries), dtype=np.int64, count=total)


def _pack_tables(entries: Sequence[BatchEntry]) -> np.ndarray:
    """All block tables as one int32 array, which goes to the device in one copy."""
    width = max(len(entry.block_table) for entry in entries)
    tables = np.zeros((len(entries), width), dtype=np.int32)
    for row, entry in enumerate(entries):
        tables[row, : len(entry.block_table)] = entry.block_table
    return tables
