"""The attention kernels on every instruction set, and what the tests of all backends do not ask: equal bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_runner import native
from model_runner.attention.cpu import CpuAttention
from model_runner.batch import BatchEntry, pack_batch
from tests.model_runner.attention_world import (
    BF16_TOLERANCE,
    CPU,
    HEADS,
    World,
    assert_near,
    mixed,
    shape_of,
)
from tests.model_runner.native_support import INSTRUCTION_SETS, PAIR_SETS, using
from tests.model_runner.test_attention import Schedule, schedules

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")

PAIRS_TOLERANCE = 1e-2
"""With weights of 9 bits at most, for means of values drawn from the standard normal distribution."""
BLOCK_SIZES = [8, 16, 32, 64, 128, 256]
LONG = [700, 260, 300]
"""More tokens than one split of the context has, and than two."""
KINDS = {"float32": (torch.float32, "float32"), "bfloat16": (torch.bfloat16, "float32")}
if PAIR_SETS:
    KINDS["pairs"] = (torch.bfloat16, "int8")
"""The dtype of K/V and what activations are; rounded ones are multiplied with bfloat16 K/V in pairs."""
needs_pairs = pytest.mark.skipif(not PAIR_SETS, reason="this CPU has no products of pairs of bfloat16")


class RoundingAttention(CpuAttention):
    """With queries and weights rounded to bfloat16, where the CPU multiplies that."""

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return native.attend(
            self._step, self._cache, layer, self.shape.scale, queries, keys, values, activations="int8"
        )


BACKEND_OF = {"float32": CpuAttention, "int8": RoundingAttention}


class TestRight:
    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("block_size", BLOCK_SIZES)
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_rows_are_those_of_float64(self, instruction_set: str, block_size: int, window: int | None) -> None:
        lengths, steps = mixed(block_size)
        for heads, head_dim in (("gqa3", 64), ("mqa", 40), ("mha", 128)):
            with using(instruction_set):
                world = World("cpu", shape_of(heads, head_dim=head_dim, block_size=block_size, window=window), lengths)
                for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
                    assert_near(rows, sequence.expected(world.shape))

    @pytest.mark.parametrize("head_dim", [2, 6, 8, 16, 24, 256])
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_heads_that_are_no_whole_number_of_vectors(self, instruction_set: str, head_dim: int) -> None:
        lengths, steps = mixed(8)
        with using(instruction_set):
            world = World("cpu", shape_of("gqa2", head_dim=head_dim, block_size=8), lengths)
            for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
                assert_near(rows, sequence.expected(world.shape))

    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_bfloat16(self, instruction_set: str, heads: str) -> None:
        lengths, steps = mixed(16)
        for head_dim in (64, 40):
            shape = replace(shape_of(heads, head_dim=head_dim), kv_dtype=torch.bfloat16)
            with using(instruction_set):
                world = World("cpu", shape, lengths)
                for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
                    assert_near(rows, sequence.expected(world.shape), BF16_TOLERANCE)

    @needs_pairs
    @pytest.mark.parametrize("window", [None, 10, 13])
    @pytest.mark.parametrize("block_size", [4, 8, 16, 128])
    def test_pairs_of_bfloat16(self, block_size: int, window: int | None) -> None:
        """Errors of queries and weights are 2**-9 each; float32 would be some hundred times nearer."""
        lengths, steps = mixed(block_size)
        for heads, head_dim in (("gqa3", 64), ("mqa", 32), ("mha", 128), ("gqa8", 96)):
            shape = shape_of(heads, head_dim=head_dim, block_size=block_size, window=window)
            world = World(RoundingAttention, replace(shape, kv_dtype=torch.bfloat16), lengths)
            for sequence in world.sequences:
                sequence.queries = sequence.queries.bfloat16().float()
            expected = [sequence.expected(world.shape) for sequence in world.sequences]
            found = world.rows(steps)
            for rows, right in zip(found, expected, strict=True):
                assert_near(rows, right, PAIRS_TOLERANCE)
            errors = [(rows - right).abs().max().item() for rows, right in zip(found, expected, strict=True)]
            assert max(errors) > 1e-4

    @needs_pairs
    def test_a_weight_of_one_in_pairs_gives_the_value_itself(self) -> None:
        """Each position attends itself alone: its score is beyond the others' by more than 100."""
        world = World(RoundingAttention, replace(shape_of("mha", num_layers=1), kv_dtype=torch.bfloat16), [70])
        (sequence,) = world.sequences
        sequence.keys = torch.nn.functional.one_hot(torch.arange(70) % 64, 64).float()[None, :, None].repeat(1, 1, 4, 1)
        sequence.queries = sequence.keys * 2048
        (rows,) = world.rows([[(0, 33)], [(0, 31)], *[[(0, 1)]] * 6])
        assert torch.equal(rows[:, :64], sequence.values[:, :64])
        assert_near(rows[:, 64:], (sequence.values[:, :6] + sequence.values[:, 64:]).double() / 2)

    @needs_pairs
    @pytest.mark.parametrize("head_dim", [40, 48])
    def test_heads_that_do_not_come_in_pairs_are_float32s(self, head_dim: int) -> None:
        shape = replace(shape_of(head_dim=head_dim, num_layers=1), kv_dtype=torch.bfloat16)
        steps = [[(0, 60)], [(0, 10)]]
        exact, rounding = (World(each, shape, [70]).rows(steps)[0] for each in BACKEND_OF.values())
        assert torch.equal(rounding, exact)

    @pytest.mark.parametrize("window", [None, 100, 290])
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_contexts_of_several_splits(self, instruction_set: str, window: int | None) -> None:
        with using(instruction_set):
            world = World("cpu", shape_of("gqa3", window=window, num_layers=1), LONG)
            steps = [[(0, 600), (1, 255)], [(2, 300), (0, 99), (1, 4)], [(0, 1), (1, 1)]]
            for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
                assert_near(rows, sequence.expected(world.shape))

    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_scores_of_any_size(self, instruction_set: str) -> None:
        """Up to 400 either way: e to their power is infinite, or 0, in float32."""
        with using(instruction_set):
            world = World("cpu", shape_of(num_layers=1), [70])
            (sequence,) = world.sequences
            sequence.queries *= 100
            (rows,) = world.rows([[(0, 50)], [(0, 20)]])
            assert_near(rows, sequence.expected(world.shape), 1e-3)

    def test_more_query_heads_to_a_kv_head_than_rows_in_a_span(self) -> None:
        shape = replace(shape_of("mqa", num_layers=1), num_heads=60)
        world = World("cpu", shape, [20])
        (rows,) = world.rows([[(0, 19)], [(0, 1)]])
        assert_near(rows, world.sequences[0].expected(world.shape))

    def test_blocks_beyond_the_two_billionth_number(self) -> None:
        """Offsets of 32 bits would wrap around. The cache is 2^31 numbers of memory that is not there until written."""
        blocks, kv_heads, block_size, dim = (1 << 16) + 2, 2, 128, 128
        sizes = ((dim // 2, block_size, 2), (block_size, dim))
        keys, values = (
            torch.from_numpy(np.zeros((1, blocks, kv_heads, *size), np.int16)).view(torch.bfloat16) for size in sizes
        )
        cached = native.c_cache(keys, values, None)
        draw = torch.Generator().manual_seed(0)
        queries, new_keys, new_values = (torch.randn(3, 2, dim, generator=draw).bfloat16() for _ in range(3))
        outputs = []
        for block in (1, blocks - 1):
            batch = pack_batch([BatchEntry([0, 0, 0], 0, [block], True)], block_size, CPU)
            step = native.c_batch(batch)
            outputs.append(native.attend(step, cached, 0, dim**-0.5, queries, new_keys, new_values))
        assert torch.equal(*outputs)
        assert torch.equal(values[0, -1, :, :3], new_values.transpose(0, 1))
        assert torch.equal(keys[0, -1].transpose(1, 2).flatten(2)[:, :3], new_keys.transpose(0, 1))
        assert outputs[0].count_nonzero() > 0


def computed(
    world: World, steps: list[list[tuple[int, int]]], threads: int, backend: type[CpuAttention] = CpuAttention
) -> list[Tensor]:
    world.restart(backend)
    with using(threads=threads):
        return world.rows(steps)


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 70, 300])
class TestInvariance:
    def world(self, kind: str, window: int | None) -> World:
        dtype, activations = KINDS[kind]
        shape = replace(shape_of("gqa3", window=window, num_layers=1), kv_dtype=dtype)
        return World(BACKEND_OF[activations], shape, LONG)

    def computed(self, kind: str, world: World, steps: list[list[tuple[int, int]]], threads: int) -> list[Tensor]:
        return computed(world, steps, threads, BACKEND_OF[KINDS[kind][1]])

    def test_whole_chunked_and_token_by_token(self, kind: str, window: int | None) -> None:
        world = self.world(kind, window)
        whole = self.computed(kind, world, [[(0, 700), (1, 260), (2, 300)]], 1)
        chunks = [[(0, 7), (2, 100)], *[[(0, 99), (1, 37)]] * 7, [(1, 1), (2, 200)]]
        assert_same_bits(self.computed(kind, world, chunks, 2), whole)
        single = [[(1, 250), (2, 290)], *[[(1, 1), (2, 1)]] * 10, [(0, 690)], *[[(0, 1)]] * 10]
        assert_same_bits(self.computed(kind, world, single, 2), whole)

    def test_alone_and_in_company(self, kind: str, window: int | None) -> None:
        world = self.world(kind, window)
        steps = [[(0, 650), (1, 255), (2, 299)], [(0, 50), (1, 5), (2, 1)]]
        together = self.computed(kind, world, steps, 2)
        for index, expected in enumerate(together):
            alone = [[each for each in work if each[0] == index] for work in steps]
            assert torch.equal(self.computed(kind, world, alone, 2)[index], expected)

    def test_threads(self, kind: str, window: int | None) -> None:
        world = self.world(kind, window)
        steps = [[(0, 699), (1, 259), (2, 299)], [(0, 1), (1, 1), (2, 1)]]
        one = self.computed(kind, world, steps, 1)
        for threads in (2, 3, 5):
            assert_same_bits(self.computed(kind, world, steps, threads), one)

    def test_where_the_blocks_lie(self, kind: str, window: int | None) -> None:
        world = self.world(kind, window)
        steps = [[(0, 700), (1, 260), (2, 300)]]
        before = self.computed(kind, world, steps, 2)
        for sequence in world.sequences:
            sequence.table = [world.shape.num_blocks - block for block in sequence.table]
        assert_same_bits(self.computed(kind, world, [steps[0][::-1]], 2), before)


@pytest.mark.parametrize("kind", KINDS)
@given(schedule=schedules(), window=st.one_of(st.none(), st.integers(1, 45)), seed=st.integers(0, 1000))
@settings(max_examples=40)
def test_any_schedule_gives_the_same_bits(kind: str, schedule: Schedule, window: int | None, seed: int) -> None:
    dtype, activations = KINDS[kind]
    shape = shape_of(head_dim=32 if kind == "pairs" else 8, block_size=8, window=window, num_layers=1)
    backend = BACKEND_OF[activations]
    world = World(backend, replace(shape, kv_dtype=dtype), schedule.lengths, seed=seed)
    whole = computed(world, [list(enumerate(schedule.lengths))], 1, backend)
    assert_same_bits(computed(world, schedule.steps, 2, backend), whole)


SHARING = {
    "a prefix that all have": [(512, 513 + index) for index in range(35)],
    "no, some and all blocks": [(0, 600), (0, 600), (16, 600), (256, 600), (592, 600), (400, 601), (512, 700)],
    "nothing beyond what is shared": [(0, 512), *[(512, 512)] * 6],
    "a prompt between": [(0, 600), (512, 600), (512, 700, 150), (512, 600), (512, 530), (512, 529)],
}
"""Sequences of a step: how many tokens lie in the same blocks as those of the one before, the length, and the tokens in
the step, 1 unless it says so."""


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize(
    ("instruction_set", "kind"),
    [(name, kind) for name in INSTRUCTION_SETS for kind in ("float32", "bfloat16")]
    + [(name, "pairs") for name in PAIR_SETS],
)
@pytest.mark.parametrize("window", [None, 300])
def test_shared_blocks_give_the_bits_of_a_sequence_alone(
    case: str, instruction_set: str, kind: str, window: int | None
) -> None:
    """Each sequence's row, among those that share its blocks, and in a step of its own."""
    dtype, activations = KINDS[kind]
    size, kv_heads, heads, dim = 16, 2, 6, 32
    tables: list[list[int]] = [[]]
    blocks = iter(range(1, 300))
    for shared, length, *_ in SHARING[case]:
        head = tables[-1][: shared // size]
        tables.append(head + [next(blocks) for _ in range(-(-length // size) - len(head))])
    draw = torch.Generator().manual_seed(0)
    pair, count = native.key_pair(dtype), next(blocks)
    keys = torch.randn(1, count, kv_heads, dim // pair, size, pair, generator=draw).to(dtype)
    values = torch.randn(1, count, kv_heads, size, dim, generator=draw).to(dtype)
    entries = [
        BatchEntry([0] * (tokens[0] if tokens else 1), length - (tokens[0] if tokens else 1), table, 1)
        for (_, length, *tokens), table in zip(SHARING[case], tables[1:], strict=True)
    ]
    ends = [0, *accumulate(len(entry.token_ids) for entry in entries)]
    queries = torch.randn(ends[-1], heads, dim, generator=draw)
    # By slots: several sequences may write to one, and in a step they do so in any order.
    written = torch.randn(2, count * size, kv_heads, dim, generator=draw)

    def attended(first: int, last: int, threads: int) -> Tensor:
        with using(instruction_set, threads):
            batch = pack_batch(entries[first:last], size, CPU)
            rows = queries[ends[first] : ends[last]], *written[:, batch.slot_mapping]
            cached = native.c_cache(keys, values, window)
            return native.attend(native.c_batch(batch), cached, 0, dim**-0.5, *rows, activations=activations)

    together = attended(0, len(entries), 1)
    assert torch.equal(attended(0, len(entries), 2), together)
    for index in range(len(entries)):
        assert torch.equal(attended(index, index + 1, 1), together[ends[index] : ends[index + 1]])


def empty_caches() -> tuple[Tensor, Tensor]:
    """4 blocks of 8 slots, with one head of 4 dimensions."""
    return torch.zeros(1, 4, 1, 4, 8, 1), torch.zeros(1, 4, 1, 8, 4)


class TestRefusals:
    def attend(self, table: list[int], position: int = 0) -> None:
        keys, values = empty_caches()
        batch = pack_batch([BatchEntry([0], position, table, True)], 8, CPU)
        cached = native.c_cache(keys, values, None)
        native.attend(native.c_batch(batch), cached, 0, 1.0, *(torch.zeros(1, 1, 4) for _ in range(3)))

    def test_a_block_that_is_not_there(self) -> None:
        self.attend([3])
        for block in (4, -1):
            with pytest.raises(native.NativeError, match=f"no block {block}"):
                self.attend([block])

    def test_what_lies_behind_the_sequence_is_not_looked_at(self) -> None:
        self.attend([3, 99])

    def test_tensors_of_the_wrong_shape(self) -> None:
        keys, values = empty_caches()
        batch = pack_batch([BatchEntry([0], 0, [1], True)], 8, CPU)
        cached = native.c_cache(keys, values, None)
        with pytest.raises(native.NativeError, match=r"\[1, 1, 4\] is wanted"):
            native.attend(native.c_batch(batch), cached, 0, 1.0, *(torch.zeros(1, 1, size) for size in (4, 4, 8)))

    @pytest.mark.parametrize(
        ("keys", "values", "reason"),
        [
            (torch.zeros(1, 4, 1, 4, 8, 1), torch.zeros(1, 4, 1, 8, 4).half(), "float32"),
            (torch.zeros(1, 4, 1, 2, 8, 2).half(), torch.zeros(1, 4, 1, 8, 4).half(), "float32"),
            (torch.zeros(1, 4, 1, 4, 8, 1), torch.zeros(1, 4, 1, 4, 8).transpose(3, 4), "contiguous"),
            (torch.zeros(1, 4, 1, 8, 4), torch.zeros(1, 4, 1, 8, 4), "fitting shapes"),
            (torch.zeros(1, 4, 1, 4, 8, 1).bfloat16(), torch.zeros(1, 4, 1, 8, 4).bfloat16(), "fitting shapes"),
            (torch.zeros(1, 4, 1, 4, 12, 1), torch.zeros(1, 4, 1, 12, 4), "blocks of 12"),
        ],
    )
    def test_caches_that_the_kernels_do_not_know(self, keys: Tensor, values: Tensor, reason: str) -> None:
        with pytest.raises(native.NativeError, match=reason):
            native.c_cache(keys, values, None)
