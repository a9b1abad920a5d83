"""The CPU's attention backends against a softmax written out in float64, on a poisoned cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model_runner.attention import BACKENDS, AttentionBackend, AttentionShape, create_backend
from model_runner.attention.nhd import NhdAttention
from model_runner.attention.triton import TritonAttention
from model_runner.batch import BatchEntry, pack_batch
from model_runner.kv_memory import KvMemory
from tests.model_runner.attention_world import BF16_TOLERANCE, CPU, HEADS, World, assert_near, mixed, shape_of

NAMES = ["cpu", "cpu_torch", "reference"]
"""Those that are fast on a CPU. All others are in test_attention_cases.py."""
COPYING = [*NAMES, *(["triton"] if TritonAttention.why_not_here(CPU) is None else [])]


@pytest.fixture(autouse=True, scope="module")
def one_thread(torch_threads: None) -> Iterator[None]:
    """Matrices as small as these gain nothing from threads, which would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestByHand:
    """One query head of 4 dimensions, so that scores are halved; keys and values are written down."""

    @staticmethod
    def run(name: str, window: int | None) -> Tensor:
        """The outputs' first components at positions 0, 1 and 2; the others are 0."""
        shape = AttentionShape(1, 1, 1, 4, 8, 2, torch.float32, CPU, sliding_window=window)
        backend = create_backend(name, shape)
        backend.poison([0, 1])
        backend.plan(pack_batch([BatchEntry([0, 0, 0], 0, [1], True)], 8, CPU))
        unit = torch.tensor([1.0, 0, 0, 0])
        # The scores of keys 0, 1 and 2 are ln 3, 0 and 0 for each query: their weights are as 3 : 1 : 1.
        queries = torch.stack([2 * math.log(3) * unit] * 3)[:, None]
        keys = torch.stack([unit, 0 * unit, 0 * unit])[:, None]
        values = torch.stack([8 * unit, 4 * unit, 1 * unit])[:, None]
        output = backend.run(0, queries, keys, values)
        assert output[..., 1:].count_nonzero() == 0
        return output[:, 0, 0]

    @pytest.mark.parametrize("name", NAMES)
    def test_causal(self, name: str) -> None:
        # 8;  (3 x 8 + 4) / 4 = 7;  (3 x 8 + 4 + 1) / 5 = 5.8
        assert_near(self.run(name, None), torch.tensor([8, 7, 5.8]))

    @pytest.mark.parametrize("name", NAMES)
    def test_a_window_of_two_counts_the_query_itself(self, name: str) -> None:
        # The last query does not see key 0: (4 + 1) / 2 = 2.5
        assert_near(self.run(name, 2), torch.tensor([8, 7, 2.5]))

    @pytest.mark.parametrize("name", NAMES)
    def test_a_window_of_one_gives_the_tokens_own_values(self, name: str) -> None:
        assert_near(self.run(name, 1), torch.tensor([8.0, 4, 1]))


class TestShapes:
    """Prefill, chunks over a cached prefix and decode, mixed in one batch."""

    @pytest.mark.parametrize("block_size", [8, 16, 32, 64])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
    def test_reference_equals_float64_and_cpu_equals_reference(
        self, block_size: int, heads: str, head_dim: int
    ) -> None:
        lengths, steps = mixed(block_size)
        world = World("reference", shape_of(heads, head_dim=head_dim, block_size=block_size), lengths)
        reference = world.rows(steps)
        for sequence, rows in zip(world.sequences, reference, strict=True):
            assert_near(rows, sequence.expected(world.shape))
        for name in ("cpu", "cpu_torch"):
            world.restart(name)
            for rows, expected in zip(world.rows(steps), reference, strict=True):
                assert_near(rows, expected)

    @pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 16, 17, 1000])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("name", NAMES)
    def test_sliding_windows(self, name: str, heads: str, window: int) -> None:
        """Smaller than a chunk, equal to a block, over several blocks, and larger than every sequence (19 tokens)."""
        lengths, steps = mixed(8)
        world = World(name, shape_of(heads, block_size=8, window=window), lengths)
        for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
            assert_near(rows, sequence.expected(world.shape))

    @pytest.mark.parametrize("name", NAMES)
    def test_a_window_larger_than_the_sequence_changes_nothing(self, name: str) -> None:
        lengths, steps = mixed(16)
        without, larger = (World(name, shape_of(window=window), lengths) for window in (None, max(lengths)))
        for rows, expected in zip(larger.rows(steps), without.rows(steps), strict=True):
            assert_near(rows, expected, 1e-6)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_single_token_sees_only_itself(self, name: str) -> None:
        world = World(name, shape_of("mha"), [1, 1, 1])
        for sequence, rows in zip(world.sequences, world.rows([[(0, 1), (1, 1), (2, 1)]]), strict=True):
            assert_near(rows, sequence.values, 1e-6)

    @pytest.mark.parametrize("name", NAMES)
    def test_results_look_like_queries(self, name: str) -> None:
        world = World(name, shape_of("gqa3"), [5])
        (output,) = world.step([(0, 5)])
        assert (output.shape, output.dtype) == (world.sequences[0].queries.shape, torch.float32)


@dataclass(frozen=True)
class Schedule:
    """A random way to compute sequences: chunks of any size, any of the sequences in a step, in any order."""

    lengths: list[int]
    steps: list[list[tuple[int, int]]]


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    left = dict(enumerate(lengths))
    steps = []
    while left:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        work = [(index, draw(st.integers(1, left[index]))) for index in chosen]
        left = {index: count - dict(work).get(index, 0) for index, count in left.items()}
        left = {index: count for index, count in left.items() if count}
        steps.append(work)
    return Schedule(lengths, steps)


class TestHowItIsComputedDoesNotMatter:
    @given(schedule=schedules(), window=st.one_of(st.none(), st.integers(1, 45)), seed=st.integers(0, 1000))
    @settings(max_examples=40)
    @pytest.mark.parametrize("name", NAMES)
    def test_any_schedule_gives_the_rows_of_dense_attention(
        self, name: str, schedule: Schedule, window: int | None, seed: int
    ) -> None:
        shape = shape_of(head_dim=8, block_size=8, window=window, num_layers=1)
        world = World(name, shape, schedule.lengths, seed=seed)
        for sequence, rows in zip(world.sequences, world.rows(schedule.steps), strict=True):
            assert_near(rows, sequence.expected(shape))

    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_prompt_in_chunks_of_seven(self, name: str, window: int | None) -> None:
        world = World(name, shape_of("gqa3", window=window), [40])
        (whole,) = world.rows([[(0, 40)]])
        world.restart(name)
        (chunked,) = world.rows([[(0, 7)]] * 5 + [[(0, 5)]])
        assert_near(chunked, whole)
        assert_near(chunked, world.sequences[0].expected(world.shape))

    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_prompt_token_by_token(self, name: str, window: int | None) -> None:
        world = World(name, shape_of("gqa3", window=window), [20])
        (decoded,) = world.rows([[(0, 1)]] * 20)
        assert_near(decoded, world.sequences[0].expected(world.shape))

    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("name", NAMES)
    def test_a_sequence_does_not_depend_on_its_neighbours(self, name: str, window: int | None) -> None:
        lengths, steps = mixed(16)
        world = World(name, shape_of(window=window), lengths)
        together = world.rows(steps)
        for index, expected in enumerate(together):
            world.restart(name)
            alone = [[each for each in work if each[0] == index] for work in steps]
            rows = world.rows([work for work in alone if work])[index]
            assert_near(rows, expected, 1e-6)

    @pytest.mark.parametrize("name", NAMES)
    def test_neither_the_blocks_nor_the_order_in_the_batch_matter(self, name: str) -> None:
        lengths, steps = mixed(16)
        world = World(name, shape_of(), lengths)
        expected = world.rows(steps)
        for sequence in world.sequences:
            # The mirror image of all ids but the null block's.
            sequence.table = [world.shape.num_blocks - block for block in sequence.table]
        world.restart(name)
        for rows, before in zip(world.rows([work[::-1] for work in steps]), expected, strict=True):
            assert_near(rows, before, 1e-6)

    @pytest.mark.parametrize("name", NAMES)
    def test_two_sequences_share_the_blocks_of_a_prefix(self, name: str) -> None:
        world = World(name, shape_of(), [35, 40])
        first, second = world.sequences
        for mine, theirs in ((second.keys, first.keys), (second.values, first.values)):
            mine[:, :32] = theirs[:, :32]
        second.table[:2] = first.table[:2]
        world.step([(0, 32)])
        second.computed = 32
        outputs = world.step([(1, 8), (0, 3)])
        assert_near(outputs[0], second.expected(world.shape)[:, 32:])
        assert_near(outputs[1], first.expected(world.shape)[:, 32:])


def slots_of(backend: AttentionBackend) -> tuple[Tensor, Tensor]:
    """K and V, copied, as [layers, blocks, block_size, kv heads, head_dim], whatever the backend's own layout is."""
    keys, values = backend.keys, backend.values
    if backend.name == "cpu":
        # [layers, blocks, kv heads, head_dim / pair, block_size, pair]
        keys = keys.transpose(3, 4).flatten(4)
    if not isinstance(backend, NhdAttention):
        keys, values = keys.transpose(2, 3), values.transpose(2, 3)
    return keys.clone(), values.clone()


def numbered(name: str) -> AttentionBackend:
    """A cache of 8 blocks of 8 slots and 3 layers in which no number occurs twice."""
    backend = BACKENDS[name](replace(shape_of(block_size=8, num_layers=3), num_blocks=8))
    keys, values = backend.keys, backend.values
    keys.copy_(torch.arange(keys.numel()).view_as(keys))
    values.copy_(-1 - torch.arange(values.numel()).view_as(values))
    return backend


class TestTheCache:
    @pytest.mark.parametrize("name", NAMES)
    def test_it_starts_at_zero(self, name: str) -> None:
        backend = create_backend(name, replace(shape_of(), num_blocks=5))
        assert backend.keys.count_nonzero() == backend.values.count_nonzero() == 0

    @pytest.mark.parametrize("name", NAMES)
    def test_a_step_writes_its_own_slots_and_no_others(self, name: str) -> None:
        """Tokens 3, 4 and 5 of a sequence in blocks 3 and 1 of size 4 go to slots 3 of block 3, 0 and 1 of block 1."""
        world = World(name, shape_of(block_size=4), [6])
        (sequence,) = world.sequences
        assert world.shape.num_blocks == 5
        sequence.table, sequence.computed = [3, 1], 3
        world.step([(0, 3)])
        for cache, new in zip(slots_of(world.backend), (sequence.keys, sequence.values), strict=True):
            for token, (block, slot) in {3: (3, 3), 4: (1, 0), 5: (1, 1)}.items():
                assert torch.equal(cache[:, block, slot], new[:, token])
                cache[:, block, slot] = float("nan")
            assert cache.isnan().all()

    @pytest.mark.parametrize("name", NAMES)
    def test_poison_fills_the_named_blocks_and_no_others(self, name: str) -> None:
        backend = numbered(name)
        before = slots_of(backend)
        backend.poison([0, 3, 7])
        for now, then in zip(slots_of(backend), before, strict=True):
            assert now[:, [0, 3, 7]].isnan().all()
            assert torch.equal(now[:, [1, 2, 4, 5, 6]], then[:, [1, 2, 4, 5, 6]])

    @pytest.mark.parametrize("name", NAMES)
    def test_reading_poison_shows(self, name: str) -> None:
        """What the other tests stand on: with one slot unwritten that a query should see, the answer is NaN."""
        world = World(name, shape_of(), [5])
        world.step([(0, 3)])
        world.sequences[0].computed = 4
        (output,) = world.step([(0, 1)])
        assert output.isnan().all()

    @pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("window", [None, 10])
    @pytest.mark.parametrize("name", NAMES)
    def test_bfloat16(self, name: str, window: int | None, query_dtype: torch.dtype) -> None:
        """A cache of half the size gives what float32 gives, within what 8 bits can tell, in the queries' dtype."""
        lengths, steps = mixed(16)
        world = World(name, replace(shape_of(window=window), kv_dtype=torch.bfloat16, query_dtype=query_dtype), lengths)
        for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
            assert rows.dtype is query_dtype
            assert_near(rows, sequence.expected(world.shape), BF16_TOLERANCE)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("name", NAMES)
    def test_its_bytes_are_those_of_the_arithmetic(self, name: str, heads: str, dtype: torch.dtype) -> None:
        shape = replace(shape_of(heads, head_dim=80, block_size=32), num_blocks=7, kv_dtype=dtype)
        memory = KvMemory(2, HEADS[heads][1], 80, dtype.itemsize, 32)
        assert create_backend(name, shape).cache_bytes == 7 * memory.bytes_per_block


class TestNames:
    def test_auto_on_a_cpu(self) -> None:
        assert create_backend("auto", shape_of()).name == "cpu"

    @pytest.mark.parametrize("name", NAMES)
    def test_each_backend_by_its_name(self, name: str) -> None:
        backend = create_backend(name, shape_of())
        assert type(backend) is BACKENDS[name]
        assert backend.name == name


def _kinds_of_work(size: int) -> Iterator[str]:
    lengths, steps = mixed(size)
    computed = [0] * len(lengths)
    for work in steps:
        for index, count in work:
            first = computed[index]
            computed[index] += count
            if first == 0:
                yield "one token" if lengths[index] == 1 else "prefill" if count == lengths[index] else "first chunk"
            else:
                yield "decode" if count == 1 else "chunk over a prefix"
    assert computed == lengths


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_the_mixed_batch_has_all_kinds_of_work(size: int) -> None:
    assert set(_kinds_of_work(size)) == {"one token", "prefill", "first chunk", "decode", "chunk over a prefix"}
