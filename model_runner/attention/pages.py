"""Block tables in the form that FlashInfer plans with: all pages in a row, and where each sequence's begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from model_runner.batch import StepBatch


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of S sequences, on the host, int32.

    query_indptr: [S + 1], where each sequence's queries begin. indptr: [S + 1], where its pages begin. indices: [P],
    block ids. last_page_len: [S], tokens in its last page, from 1 to the block size.
    """

    query_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def pages_of(batch: StepBatch, sequences: slice, block_size: int, first_block: int = 0) -> Pages:
    """The pages of some of a batch's sequences, from their block number `first_block` on.

    Each must have a token there.
    """
    lengths = np.array(batch.lengths[sequences], dtype=np.int64) - first_block * block_size
    counts = -(-lengths // block_size)
    tables = batch.host_tables[sequences, first_block:].numpy()
    is_page = np.arange(tables.shape[1]) < counts[:, None]
    return Pages(
        query_indptr=_offsets(np.array(batch.query_lengths[sequences], dtype=np.int64)),
        indptr=_offsets(counts),
        indices=torch.from_numpy(tables[is_page]),
        last_page_len=torch.from_numpy((lengths - (counts - 1) * block_size).astype(np.int32)),
    )


def prefix_pages(batch: StepBatch, sequences: slice, block_size: int, num_blocks: int) -> Pages:
    """The first blocks of sequences that share them, as the pages of one sequence whose queries are those of all."""
    queries = sum(batch.query_lengths[sequences])
    return Pages(
        query_indptr=torch.tensor([0, queries], dtype=torch.int32),
        indptr=torch.tensor([0, num_blocks], dtype=torch.int32),
        indices=batch.host_tables[sequences][0, :num_blocks].contiguous(),
        last_page_len=torch.tensor([block_size], dtype=torch.int32),
    )


def num_shared_blocks(batch: StepBatch, sequences: slice, block_size: int) -> int:
    """Blocks that all of the sequences begin with; at least one token of each, its last, is behind them."""
    tables = batch.host_tables[sequences].numpy()
    same = (tables == tables[:1]).all(axis=0)
    alike = len(same) if same.all() else int(same.argmin())
    first_queries = (
        length - count for length, count in zip(batch.lengths[sequences], batch.query_lengths[sequences], strict=True)
    )
    return min(alike, min(first_queries) // block_size)


def num_common_blocks(tables: Sequence[Sequence[int]]) -> int:
    """Blocks that all block tables begin with."""
    # Whatever the least and the greatest of them share, those between share too.
    lists = cast("Sequence[list[int]]", tables)
    pairs = zip(min(lists), max(lists), strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(map(len, tables)))


def _offsets(counts: np.ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
