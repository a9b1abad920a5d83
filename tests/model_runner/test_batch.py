"""Packing a step: against tensors written down by hand, and against a loop over single tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.batch import BatchEntry, StepBatch, pack_batch

CPU = torch.device("cpu")


def pack(entries: list[BatchEntry], block_size: int = 4) -> StepBatch:
    return pack_batch(entries, block_size, CPU)


class TestByHand:
    @pytest.fixture
    def batch(self) -> StepBatch:
        """Blocks of 4 tokens. A chunk across a block boundary, a first token, and a chunk in the third block."""
        return pack(
            [
                BatchEntry([11, 12, 13], 3, [7, 2], num_logits=0),
                BatchEntry([21], 0, [5], num_logits=1),
                BatchEntry([31, 32], 8, [1, 9, 3], num_logits=1),
            ]
        )

    def test_tokens_and_positions(self, batch: StepBatch) -> None:
        assert batch.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
        assert batch.positions.tolist() == [3, 4, 5, 0, 8, 9]

    def test_slots(self, batch: StepBatch) -> None:
        # Position 3 is slot 3 of block 7: 7 x 4 + 3. Positions 4 and 5 are slots 0 and 1 of block 2. Position 0 is slot
        # 0 of block 5. Positions 8 and 9 are slots 0 and 1 of the third block, 3.
        assert batch.slot_mapping.tolist() == [31, 8, 9, 20, 12, 13]

    def test_offsets_and_lengths(self, batch: StepBatch) -> None:
        assert batch.query_offsets.tolist() == [0, 3, 4, 6]
        assert batch.sequence_lengths.tolist() == [6, 1, 10]
        assert (batch.query_lengths, batch.lengths) == ((3, 1, 2), (6, 1, 10))

    def test_tables_are_padded_with_the_null_block(self, batch: StepBatch) -> None:
        assert batch.block_tables.tolist() == [[7, 2, 0], [5, 0, 0], [1, 9, 3]]

    def test_logits_are_wanted_of_last_rows(self, batch: StepBatch) -> None:
        # The first entry wants none; the second's last row is 3, the third's is 5.
        assert batch.logits_rows.tolist() == [3, 5]

    def test_dtypes(self, batch: StepBatch) -> None:
        for each in (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_rows):
            assert each.dtype is torch.int64
        for each in (batch.query_offsets, batch.sequence_lengths, batch.block_tables):
            assert each.dtype is torch.int32
        assert all(type(count) is int for count in (*batch.query_lengths, *batch.lengths))


class TestEdges:
    def test_nobody_wants_logits(self) -> None:
        rows = pack([BatchEntry([1, 2], 0, [1], num_logits=0)]).logits_rows
        assert (rows.tolist(), rows.dtype) == ([], torch.int64)

    def test_one_token(self) -> None:
        batch = pack([BatchEntry([9], 4, [3, 6], num_logits=1)])
        assert batch.slot_mapping.tolist() == [24]
        assert batch.query_offsets.tolist() == [0, 1]
        assert batch.logits_rows.tolist() == [0]

    def test_a_table_may_have_room_to_spare(self) -> None:
        batch = pack([BatchEntry([1, 2], 3, [8, 6, 7], num_logits=1)])
        assert batch.slot_mapping.tolist() == [35, 24]
        assert batch.block_tables.tolist() == [[8, 6, 7]]

    def test_slots_beyond_32_bits(self) -> None:
        # 2,000,000,000 fits int32; its slots, from 2,000,000,000 x 64 on, don't.
        batch = pack([BatchEntry([1, 2], 62, [2_000_000_000, 1], num_logits=1)], block_size=64)
        assert batch.slot_mapping.tolist() == [128_000_000_062, 128_000_000_063]
        assert batch.block_tables.tolist() == [[2_000_000_000, 1]]

    @pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("I", ids)])
    def test_any_sequence_type_will_do(self, kind: Callable[[list[int]], Sequence[int]]) -> None:
        batch = pack([BatchEntry(kind([5, 6]), 0, kind([3]), num_logits=1)])
        assert batch.token_ids.tolist() == [5, 6]
        assert batch.slot_mapping.tolist() == [12, 13]

    def test_later_changes_of_a_table_do_not_reach_the_batch(self) -> None:
        table = [4]
        batch = pack([BatchEntry([1], 0, table, num_logits=1)])
        table[0] = 5
        assert batch.block_tables.tolist() == [[4]]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[BatchEntry], int]:
    """Entries with a block size; the tables have room for the tokens, and up to two blocks more."""
    block_size = draw(st.sampled_from([1, 3, 8, 16]))
    entries = []
    for _ in range(draw(st.integers(1, 6))):
        token_ids = draw(st.lists(st.integers(0, 200_000), min_size=1, max_size=20))
        first = draw(st.integers(0, 50))
        needed = -(-(first + len(token_ids)) // block_size)
        table = draw(st.lists(st.integers(1, 10_000), min_size=needed, max_size=needed + 2))
        entries.append(BatchEntry(token_ids, first, table, draw(st.integers(0, len(token_ids)))))
    return entries, block_size


@given(steps())
def test_packing_equals_a_loop_over_tokens(step: tuple[list[BatchEntry], int]) -> None:
    entries, block_size = step
    token_ids, positions, slots, wanted, offsets = [], [], [], [], [0]
    for entry in entries:
        for index, token_id in enumerate(entry.token_ids):
            position = entry.first_position + index
            token_ids.append(token_id)
            positions.append(position)
            slots.append(entry.block_table[position // block_size] * block_size + position % block_size)
        offsets.append(len(token_ids))
        wanted.extend(range(len(token_ids) - entry.num_logits, len(token_ids)))
    width = max(len(entry.block_table) for entry in entries)
    lengths = [entry.first_position + len(entry.token_ids) for entry in entries]

    batch = pack(entries, block_size)
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logits_rows.tolist() == wanted
    assert batch.query_offsets.tolist() == offsets
    assert batch.sequence_lengths.tolist() == list(batch.lengths) == lengths
    assert list(batch.query_lengths) == [len(entry.token_ids) for entry in entries]
    assert batch.block_tables.tolist() == [
        [*entry.block_table, *[0] * (width - len(entry.block_table))] for entry in entries
    ]
