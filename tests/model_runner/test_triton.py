"""The triton backend's kernels compile for GPUs that are not there, and how it cuts a step into programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from model_runner.attention import AttentionShape
from model_runner.attention.triton import Tiling, TritonAttention, tiling_for
from model_runner.batch import BatchEntry, pack_batch
from model_runner.config_hf import config_from_hf
from model_runner.models.decoder import Decoder
from model_runner.weights import SafetensorsWeights
from tests.model_runner.test_families import backend_for, last_logits

CPU = torch.device("cpu")
reason = TritonAttention.why_not_here(CPU)
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that one program can have, by compute capability: table 'Technical Specifications' of the CUDA guide."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What kernel_compiler prints: run as a program, because here the kernels are interpreted."""
    cache = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.model_runner.kernel_compiler"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_launch_compiles_for_each_generation(compiled: list[dict[str, Any]]) -> None:
    # A window of 64 keys is one part of them: nothing is merged there.
    launches = ["copy_blocks", "write", "attend", "attend"]
    expected = {80: 3, 90: 1, 100: 1}
    for capability, shapes in expected.items():
        kernels = [each["kernel"] for each in compiled if each["capability"] == capability]
        merges = shapes - (capability == 80)
        assert sorted(kernels) == sorted(launches * shapes + ["merge"] * merges)
    assert all(each["bytes"] > 0 for each in compiled)


def test_no_program_wants_more_shared_memory_than_there_is(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        assert each["shared"] <= SHARED_MEMORY[each["capability"]], each


def test_offsets_into_a_cache_have_64_bits(compiled: list[dict[str, Any]]) -> None:
    """Of the shape whose K/V has 8 bits, so that its pointers are known: what is read and written of K and of V."""
    found = [(each["kernel"], each["offsets"]) for each in compiled if each["capability"] == 90]
    assert sorted(found) == [
        ("attend", ["i64"] * 2),
        ("attend", ["i64"] * 2),
        ("copy_blocks", ["i64"] * 4),
        ("merge", []),
        ("write", ["i64"] * 2),
    ]


def shape_of(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None = None) -> AttentionShape:
    return AttentionShape(1, heads, kv_heads, head_dim, 16, 80, dtype, CPU, sliding_window=window, query_dtype=dtype)


class TestTiles:
    @staticmethod
    def planned(shape: AttentionShape, entries: list[tuple[int, int]]) -> TritonAttention:
        """Plans (first position, tokens) with tiles of 8 rows and parts of 32 keys."""
        backend = TritonAttention(shape, Tiling(rows=16, keys=16, part=32))
        table = list(range(1, 80))
        batch = [BatchEntry([0] * count, first, table, True) for first, count in entries]
        backend.plan(pack_batch(batch, 16, CPU))
        return backend

    def test_runs_of_tokens_become_tiles_of_rows(self) -> None:
        """3 query heads take 4 rows, so a tile of 16 rows has 4 tokens: 9 tokens are 3 tiles, 4 are one."""
        backend = self.planned(shape_of(3, 1, 64, torch.float32), [(0, 9), (7, 1), (100, 4)])
        assert backend._long.sequences.tolist() == [0, 0, 0, 2]
        assert backend._long.firsts.tolist() == [0, 4, 8, 0]
        assert backend._single.sequences.tolist() == [1]

    @pytest.mark.parametrize(
        ("length", "window", "parts"),
        [
            (32, None, 0),  # one part has all keys: nothing to merge
            (33, None, 2),
            (64, None, 2),
            (65, None, 3),
            (1000, None, 32),
            (1000, 32, 2),  # keys 968 to 999: read from 960 on, 40 of them
            (1000, 24, 0),  # keys 976 to 999
        ],
    )
    def test_parts_of_a_long_sequence(self, length: int, window: int | None, parts: int) -> None:
        backend = self.planned(shape_of(4, 1, 64, torch.float32, window), [(length - 1, 1)])
        assert backend._single.parts == parts

    @pytest.mark.parametrize(
        ("width", "window", "parts", "part"),
        [
            (2, None, 0, 32),  # 32 tokens
            (3, None, 2, 32),
            (64, None, 32, 32),  # 1,024 tokens
            (65, None, 17, 64),  # 1,040 would be 33 parts of 32 keys
            (64, 32, 2, 32),  # up to 15 keys before the window are read with it
            (64, 17, 0, 32),
        ],
    )
    def test_parts_of_the_longest_sequence(self, width: int, window: int | None, parts: int, part: int) -> None:
        """In a graph all steps have as many."""
        backend = self.planned(shape_of(4, 1, 64, torch.float32, window), [(0, 1)])
        backend.plan_replay(pack_batch([BatchEntry([0], 0, list(range(1, width + 1)), True)], 16, CPU))
        assert (backend._single.parts, backend._single.part) == (parts, part)

    def test_prompts_are_never_cut(self) -> None:
        backend = self.planned(shape_of(4, 1, 64, torch.float32), [(0, 200)])
        assert (backend._long.parts, len(backend._single)) == (0, 0)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [1, 3, 8, 71, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_are_what_the_kernels_can_have(head_dim: int, heads: int, dtype: torch.dtype) -> None:
    """Powers of two, 16 at least, and room for one token of all query heads of a KV head."""
    tiling = tiling_for(shape_of(heads, 1, head_dim, dtype))
    for size in (tiling.rows, tiling.keys, tiling.part):
        assert size >= 16
        assert size & (size - 1) == 0
    assert tiling.rows >= heads
    assert tiling.part % tiling.keys == 0


@pytest.mark.parametrize("family", ["llama", "qwen2_window"])
def test_a_whole_model(family: str, tiny_models: Path) -> None:
    """Logits recorded from transformers, of prompts in chunks of 7 tokens."""
    config = config_from_hf(tiny_models / family)
    model = Decoder(config, SafetensorsWeights(tiny_models / family), torch.float32, CPU)
    item = json.loads((tiny_models / family / "golden.json").read_text())[0]
    backend = backend_for("triton", config)
    assert isinstance(backend, TritonAttention)
    logits = last_logits(model, backend, item["token_ids"], 7)
    torch.testing.assert_close(logits, torch.tensor(item["logits"]), atol=1e-4, rtol=0)
