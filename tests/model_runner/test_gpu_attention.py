"""How the FlashInfer and FlashAttention backends plan: pages, shared prefixes, and what they say they can't."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.attention import varlen

from model_runner.attention import AttentionBackend, AttentionShape, flashinfer
from model_runner.attention.flash_attn import VERSIONS, FlashAttention, Version
from model_runner.attention.flashinfer import FlashInferAttention, wants_tensor_cores
from model_runner.attention.pages import num_common_blocks, num_shared_blocks, pages_of, prefix_pages
from model_runner.batch import BatchEntry, StepBatch, pack_batch
from model_runner.kv_scales import KvScales
from tests.model_runner import flash_attn_doubles, gpu_doubles
from tests.model_runner.attention_world import CPU, World, assert_near
from tests.model_runner.gpu_doubles import recorded

HALF = torch.float16
SHAPE = AttentionShape(1, 4, 2, 64, 16, 1, HALF, CPU, query_dtype=HALF)
TOLERANCE = 5e-3
"""float16 has 11 bits: values up to 4 are off by 2**-9 at most, and so are the weights and the result."""


def batch_of(*entries: tuple[int, int, list[int]], block_size: int = 4) -> StepBatch:
    """Of (first position, tokens, block table)."""
    packed = [BatchEntry([0] * count, first, table, True) for first, count, table in entries]
    return pack_batch(packed, block_size, CPU)


FUNCTIONS: dict[str, Any] = {
    "FlashAttention 3": recorded("flash_attn_interface", "flash_attn_with_kvcache"),
    "FlashAttention 2": recorded("flash_attn", "flash_attn_varlen_func"),
    "torch's varlen_attn": varlen.varlen_attn,
}
"""With the signatures that they have."""


class TestPages:
    def test_by_hand(self) -> None:
        """9 tokens on three pages with one in the last; 8 on two full ones; one token. Tables may be longer."""
        batch = batch_of((8, 1, [7, 3, 5, 9]), (2, 6, [1, 2, 8]), (0, 1, [4]))
        pages = pages_of(batch, slice(None), 4)
        assert pages.indptr.tolist() == [0, 3, 5, 6]
        assert pages.indices.tolist() == [7, 3, 5, 1, 2, 4]
        assert pages.last_page_len.tolist() == [1, 4, 1]
        assert pages.query_indptr.tolist() == [0, 1, 7, 8]
        for each in (pages.indptr, pages.indices, pages.last_page_len, pages.query_indptr):
            assert each.dtype == torch.int32

    def test_of_some_sequences_and_from_a_block_on(self) -> None:
        batch = batch_of((8, 1, [7, 3, 5, 9]), (11, 1, [7, 3, 8]), (0, 1, [4]))
        pages = pages_of(batch, slice(0, 2), 4, first_block=2)
        assert pages.indptr.tolist() == [0, 1, 2]
        assert pages.indices.tolist() == [5, 8]
        assert pages.last_page_len.tolist() == [1, 4]

    def test_of_a_prefix(self) -> None:
        batch = batch_of((8, 1, [7, 3, 5]), (11, 2, [7, 3, 8, 6]))
        pages = prefix_pages(batch, slice(None), 4, 2)
        assert pages.query_indptr.tolist() == [0, 3]
        assert pages.indptr.tolist() == [0, 2]
        assert pages.indices.tolist() == [7, 3]
        assert pages.last_page_len.tolist() == [4]

    @pytest.mark.parametrize(
        ("entries", "shared"),
        [
            ([(8, 1, [7, 3, 5]), (11, 1, [7, 3, 8])], 2),
            ([(8, 1, [7, 3, 5]), (11, 1, [1, 3, 8])], 0),
            ([(8, 1, [7, 3, 5]), (9, 1, [7, 3, 5])], 2),
            # The last token of each is behind what is shared.
            ([(7, 1, [7, 3]), (9, 1, [7, 3, 5])], 1),
            ([(3, 1, [7]), (9, 1, [7, 3, 5])], 0),
            # A shorter table is padded with the null block, which nobody holds.
            ([(4, 1, [7, 3]), (9, 1, [7, 3, 5])], 1),
            ([(9, 1, [7, 3, 5])], 2),
        ],
    )
    def test_what_sequences_share(self, entries: list[tuple[int, int, list[int]]], shared: int) -> None:
        batch = batch_of(*entries)
        assert num_shared_blocks(batch, slice(None), 4) == shared


@pytest.mark.parametrize(
    ("tables", "common"),
    [
        ([[1, 2, 3], [1, 2, 4]], 2),
        ([[5, 1], [6, 1]], 0),
        ([[3]], 1),
        ([[1, 2, 9], [1, 2], [1, 2, 3]], 2),
        ([[], [1]], 0),
    ],
)
def test_blocks_that_tables_begin_with(tables: list[list[int]], common: int) -> None:
    assert num_common_blocks(tables) == common


def make_flashinfer(shape: AttentionShape) -> AttentionBackend:
    return FlashInferAttention(shape, gpu_doubles.flashinfer, workspace_bytes=16)


class TestFlashInfer:
    def test_decode_comes_first_and_all_else_is_prefill(self) -> None:
        backend = make_flashinfer(replace(SHAPE, num_blocks=20, block_size=4))
        assert isinstance(backend, FlashInferAttention)
        backend.plan(batch_of((8, 1, [7, 3, 5]), (0, 1, [1]), (0, 3, [2]), (5, 1, [8, 9])))
        assert [part.rows for part in backend._parts] == [slice(0, 2), slice(2, None)]
        backend.plan(batch_of((8, 1, [7, 3, 5]), (0, 1, [1])))
        assert [part.rows for part in backend._parts] == [slice(0, 2)]
        backend.plan(batch_of((0, 3, [2]), (5, 1, [8, 9])))
        assert [part.rows for part in backend._parts] == [slice(0, None)]

    def test_a_single_token_among_prompts(self) -> None:
        """It goes with the prompts, because what is before it has several rows."""
        world = World(make_flashinfer, SHAPE, [20, 9, 5])
        world.step([(0, 12), (1, 8)])
        outputs = world.step([(0, 8), (1, 1), (2, 5)])
        first, second, third = (sequence.expected(world.shape) for sequence in world.sequences)
        for rows, expected in zip(outputs, (first[:, 12:], second[:, 8:], third), strict=True):
            assert_near(rows, expected, TOLERANCE)

    @pytest.mark.parametrize("cap", [None, 3.0])
    @pytest.mark.parametrize("scales", [None, KvScales((0.5, 0.03), (0.25, 1.7))])
    def test_a_shared_prefix_is_read_once(self, scales: KvScales | None, cap: float | None) -> None:
        shape = replace(SHAPE, num_layers=2, logits_soft_cap=cap, scales=scales)
        if scales is not None:
            shape = replace(shape, kv_dtype=torch.float8_e4m3fn)
        with mock.patch.object(flashinfer, "CASCADE_TOKENS", 32):
            world = World(make_flashinfer, shape, [36, 50, 34, 40])
            first, *others = world.sequences
            for other in others:
                other.keys[:, :32], other.values[:, :32] = first.keys[:, :32], first.values[:, :32]
                other.table[:2], other.computed = first.table[:2], 32
            world.step([(0, 33)])
            world.step([(1, 17), (3, 1)])
            backend = world.backend
            assert isinstance(backend, FlashInferAttention)
            with mock.patch.object(backend._api, "merge_state", side_effect=backend._api.merge_state) as merge:
                outputs = world.step([(0, 1), (1, 1), (2, 1), (3, 1)])
        assert merge.call_count == 2
        for sequence, rows in zip(world.sequences, outputs, strict=True):
            here = sequence.computed - 1
            assert_near(rows, sequence.expected(world.shape)[:, here : here + 1], TOLERANCE)

    @pytest.mark.parametrize(
        ("window", "sequences", "tokens", "gains"),
        [
            # Llama 3 8B's K/V in bfloat16 take 128 KiB a token: 8 GiB are 65,536 tokens that need not be read.
            (None, 65, 1024, True),
            (None, 65, 1008, False),
            (None, 5, 16 * 1024, True),
            (None, 3, 64 * 1024, False),
            (4096, 65, 1024, False),
        ],
    )
    def test_when_a_shared_prefix_is_worth_more_than_a_graph(
        self, window: int | None, sequences: int, tokens: int, gains: bool
    ) -> None:
        shape = replace(SHAPE, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, sliding_window=window)
        backend = make_flashinfer(replace(shape, num_blocks=2))
        shared = list(range(1, 1 + tokens // 16))
        assert backend.gains_from_plan([[*shared, 5000 + row] for row in range(sequences)]) is gains

    @pytest.mark.parametrize(("window", "sequences"), [(40, 4), (None, 3)])
    def test_when_a_shared_prefix_is_not(self, window: int | None, sequences: int) -> None:
        """Under a window, and with few sequences."""
        backend = make_flashinfer(replace(SHAPE, num_blocks=90, sliding_window=window))
        assert isinstance(backend, FlashInferAttention)
        shared = list(range(1, 41))
        entries = [(640, 1, [*shared, 50 + row]) for row in range(sequences)]
        backend.plan(batch_of(*entries, block_size=16))
        (part,) = backend._parts
        assert part.run == backend._decode.run

    @pytest.mark.parametrize("group", range(1, 17))
    def test_every_group_can_be_decoded(self, group: int) -> None:
        """Those that the kernels without tensor cores lack go by the others; the double refuses them as FlashInfer."""
        world = World(make_flashinfer, replace(SHAPE, num_heads=group, num_kv_heads=1), [18])
        (prompt, token) = world.step([(0, 17)])[0], world.step([(0, 1)])[0]
        expected = world.sequences[0].expected(world.shape)
        assert_near(torch.cat([prompt, token], dim=1), expected, TOLERANCE)

    def test_tensor_cores(self) -> None:
        groups = {group: wants_tensor_cores(replace(SHAPE, num_heads=group, num_kv_heads=1)) for group in range(1, 9)}
        assert [group for group, wants in groups.items() if not wants] == [1, 2, 3]
        assert wants_tensor_cores(replace(SHAPE, num_heads=2, kv_dtype=torch.float8_e4m3fn))


class TestFlashAttention:
    @pytest.mark.parametrize(
        ("version", "double"),
        [(VERSIONS[1], flash_attn_doubles.flash_attn_2), (VERSIONS[2], flash_attn_doubles.varlen_attn)],
    )
    @pytest.mark.parametrize("window", [None, 9])
    def test_the_versions_that_read_large_blocks(self, version: Any, double: Any, window: int | None) -> None:
        shape = replace(SHAPE, block_size=256, sliding_window=window)
        world = World(lambda given: FlashAttention(given, version, double), shape, [260, 7, 1])
        rows = world.rows([[(0, 250), (2, 1)], [(0, 9), (1, 7)], [(0, 1)]])
        for sequence, found in zip(world.sequences, rows, strict=True):
            assert_near(found, sequence.expected(world.shape), TOLERANCE)

    @pytest.mark.parametrize(
        ("version", "size", "cap", "reason"),
        [
            (0, 16, 5.0, None),
            (1, 16, None, "FlashAttention 2 reads blocks of multiples of 256 tokens, not of 16"),
            (1, 128, None, "FlashAttention 2 reads blocks of multiples of 256 tokens, not of 128"),
            (1, 512, 5.0, None),
            (2, 64, None, "torch's varlen_attn reads blocks of multiples of 256 tokens, not of 64"),
            (2, 256, 5.0, "torch's varlen_attn has no soft cap of logits"),
            (2, 256, None, None),
        ],
    )
    def test_which_version_reads_what(self, version: int, size: int, cap: float | None, reason: str | None) -> None:
        assert VERSIONS[version].why_not(replace(SHAPE, block_size=size, logits_soft_cap=cap)) == reason


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A GPU, and what stands for a version's function by its title; all others are not installed."""
    functions: dict[str, Any] = {}

    def load(version: Version) -> Any:
        if version.title not in functions:
            raise ModuleNotFoundError(version.module)
        return functions[version.title]

    monkeypatch.setattr(Version, "load", load)
    monkeypatch.setattr(FlashAttention, "why_not_here", lambda device: None)
    return functions


class TestVersions:
    @pytest.mark.parametrize(
        ("there", "size", "taken"),
        [
            (["FlashAttention 3", "FlashAttention 2"], 256, "FlashAttention 3"),
            (["FlashAttention 2", "torch's varlen_attn"], 256, "FlashAttention 2"),
            (["torch's varlen_attn"], 256, "torch's varlen_attn"),
            (["FlashAttention 3", "FlashAttention 2"], 16, "FlashAttention 3"),
        ],
    )
    def test_the_best_that_reads_the_blocks(
        self, installed: dict[str, Any], there: list[str], size: int, taken: str
    ) -> None:
        installed |= {title: FUNCTIONS[title] for title in there}
        shape = replace(SHAPE, block_size=size)
        assert FlashAttention.why_not(shape) is None
        assert FlashAttention(shape)._version.title == taken

    def test_small_blocks_are_why_not(self, installed: dict[str, Any]) -> None:
        installed |= FUNCTIONS
        del installed["FlashAttention 3"]
        assert FlashAttention.why_not(SHAPE) == (
            "FlashAttention 3 is not installed; FlashAttention 2 reads blocks of multiples of 256 tokens, not of 16; "
            "torch's varlen_attn reads blocks of multiples of 256 tokens, not of 16"
        )

    def test_a_release_without_block_tables(self, installed: dict[str, Any]) -> None:
        """torch had varlen_attn before it had block tables."""
        installed["torch's varlen_attn"] = lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k: None
        reason = FlashAttention.why_not(replace(SHAPE, block_size=256))
        assert reason is not None
        assert reason.endswith("; torch's varlen_attn has no block tables")

    def test_the_doubles_have_the_parameter(self) -> None:
        """Recorded from the packages; torch's is here."""
        for version in VERSIONS:
            assert version.tables in inspect.signature(FUNCTIONS[version.title]).parameters


class TestWhyNot:
    @pytest.mark.parametrize(
        ("backend", "change", "reason"),
        [
            (FlashInferAttention, {}, None),
            (FlashInferAttention, {"head_dim": 80}, "its kernels have heads of 64, 128, 256 dimensions, not 80"),
            (FlashInferAttention, {"query_dtype": torch.float32}, "its kernels have no queries in float32"),
            (
                FlashInferAttention,
                {"kv_dtype": torch.bfloat16},
                "its kernels have no bfloat16 K/V for queries in float16",
            ),
            (FlashInferAttention, {"kv_dtype": torch.float8_e4m3fn, "scales": KvScales((0.3,), (2.0,))}, None),
            (FlashAttention, {}, None),
            (FlashAttention, {"head_dim": 80}, None),
            (
                FlashAttention,
                {"head_dim": 100},
                "its kernels have heads of multiples of 8 up to 256 dimensions, not 100",
            ),
            (
                FlashAttention,
                {"kv_dtype": torch.float8_e4m3fn},
                "its kernels read K/V in float8_e4m3fn only for queries that are rounded to it too",
            ),
            (
                FlashAttention,
                {"kv_dtype": torch.bfloat16},
                "its kernels have float16 or bfloat16 for both, not queries in float16 over K/V in bfloat16",
            ),
        ],
    )
    def test_shapes(self, backend: type[AttentionBackend], change: dict[str, Any], reason: str | None) -> None:
        assert backend.why_not_shape(replace(SHAPE, **change)) == reason

    @pytest.mark.parametrize("backend", [FlashInferAttention, FlashAttention])
    def test_a_cpu(self, backend: type[AttentionBackend]) -> None:
        assert backend.why_not(SHAPE) == "the device is cpu, and it needs CUDA"
