"""The arithmetic of K/V memory against published figures: those of the paged attention paper and of vLLM."""

from __future__ import annotations

import re

import pytest

from model_runner.kv_memory import KvMemory, describe_bytes
from services.config_values import parse_bytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Hidden size 4096 in 32 heads of 128, 32 layers, 2 bytes an element.
HIDDEN_4096 = KvMemory(num_layers=32, num_kv_heads=32, head_dim=128, element_bytes=2, block_size=16)
# The same with 8 KV heads for the 32 query heads.
GROUPED = KvMemory(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2, block_size=16)
# OPT-13B, of "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023):
# hidden size 5120 in 40 heads, 40 layers.
OPT_13B = KvMemory(num_layers=40, num_kv_heads=40, head_dim=128, element_bytes=2, block_size=16)


class TestPublishedFigures:
    def test_a_token_of_hidden_size_4096(self) -> None:
        # 2 (K, V) x 4096 x 2 bytes = 16 KiB a layer; x 32 layers = 512 KiB, "524 KB".
        assert HIDDEN_4096.bytes_per_token == 524_288 == 512 * KIB
        assert HIDDEN_4096.bytes_per_block == 8 * MIB

    def test_a_request_of_100_000_tokens(self) -> None:
        # 100,000 / 16 = 6,250 blocks, and the null block; 100,000 x 512 KiB = 48.8 GiB.
        assert HIDDEN_4096.blocks_for_tokens(100_000) == 6_250 + 1
        assert 6_250 * HIDDEN_4096.bytes_per_block == 100_000 * 524_288
        assert describe_bytes(6_250 * HIDDEN_4096.bytes_per_block) == "48.83 GiB"

    def test_grouped_heads_need_a_quarter(self) -> None:
        # 8 KV heads of 32: 12.2 GiB.
        assert GROUPED.bytes_per_token * 4 == HIDDEN_4096.bytes_per_token
        assert describe_bytes(6_250 * GROUPED.bytes_per_block) == "12.21 GiB"

    def test_the_paper_s_opt_13b(self) -> None:
        # 2 x 5120 x 40 x 2 = 819,200 bytes a token; table 1 of the paper: 12 GB hold 15.7 K slots.
        assert OPT_13B.bytes_per_token == 819_200
        assert OPT_13B.blocks_for_budget(12 * GIB) * 16 == 15_728

    def test_a_reserved_request_of_4096_tokens(self) -> None:
        # What a cache without pages reserves for each request of hidden size 4096: "2 GB".
        assert 4096 * HIDDEN_4096.bytes_per_token == 2 * GIB

    def test_vllm_counts_the_null_block(self) -> None:
        # 512 tokens fill 32 blocks of 16; vLLM demands 33.
        assert HIDDEN_4096.blocks_for_tokens(512) == 33


class TestBlocks:
    @pytest.mark.parametrize(
        ("num_tokens", "num_blocks"), [(1, 2), (15, 2), (16, 2), (17, 3), (32, 3), (33, 4), (513, 34)]
    )
    def test_for_tokens(self, num_tokens: int, num_blocks: int) -> None:
        """Whole blocks, rounded up, and the null block."""
        assert GROUPED.blocks_for_tokens(num_tokens) == num_blocks

    @pytest.mark.parametrize(
        ("budget", "num_blocks"), [(16 * MIB, 2), (24 * MIB - 1, 2), (24 * MIB, 3), (GIB - 1, 127), (GIB, 128)]
    )
    def test_for_a_budget(self, budget: int, num_blocks: int) -> None:
        """Blocks of 8 MiB, rounded down: a budget is never exceeded."""
        assert HIDDEN_4096.blocks_for_budget(budget) == num_blocks

    @pytest.mark.parametrize("block_size", [8, 16, 32, 64])
    def test_a_block_grows_with_its_tokens(self, block_size: int) -> None:
        memory = KvMemory(32, 8, 128, 2, block_size)
        assert memory.bytes_per_block == block_size * memory.bytes_per_token

    def test_float32_needs_twice_as_much(self) -> None:
        assert KvMemory(32, 8, 128, 4, 16).bytes_per_token == 2 * GROUPED.bytes_per_token


class TestTooSmallABudget:
    @pytest.mark.parametrize(("budget", "holds"), [(0, 0), (1, 0), (8 * MIB, 1), (16 * MIB - 1, 1)])
    def test_it_is_refused_with_the_numbers(self, budget: int, holds: int) -> None:
        """The null block alone serves nobody."""
        with pytest.raises(ValueError, match="--kv-cache-memory") as raised:
            HIDDEN_4096.blocks_for_budget(budget)
        sentence = str(raised.value)
        assert sentence.startswith(f"{describe_bytes(budget)} of KV cache memory")
        assert f"{holds} blocks of 8 MiB" in sentence
        assert "at least 2" in sentence
        assert "16384KiB or more" in sentence

    @pytest.mark.parametrize(
        "memory", [HIDDEN_4096, GROUPED, OPT_13B, KvMemory(30, 3, 64, 2, 16), KvMemory(30, 3, 64, 4, 16)]
    )
    def test_the_value_it_names_works(self, memory: KvMemory) -> None:
        """Read back as the setting reads it, the value buys the two blocks that are needed."""
        with pytest.raises(ValueError, match="--kv-cache-memory") as raised:
            memory.blocks_for_budget(memory.bytes_per_block)
        named = re.search(r"give --kv-cache-memory (.+) or more", str(raised.value))
        assert named is not None
        assert memory.blocks_for_budget(parse_bytes(named[1])) == 2


class TestDescriptions:
    def test_the_arithmetic(self) -> None:
        # 2 x 8 x 128 x 2 = 4,096 bytes a token and layer, x 32 = 131,072; x 16 = 2 MiB a block; 1,025 blocks of which
        # one is the null block: 1,024 x 16 = 16,384 tokens. With 32 KV heads it would be four times as much.
        assert GROUPED.describe(1_025, num_heads=32) == {
            "kv_of_a_token": "2 (K, V) x 8 KV heads x 128 x 2 B = 4,096 B a layer; x 32 layers = 131,072 B",
            "kv_of_a_block": "x 16 tokens = 2 MiB",
            "kv_cache": "1,025 blocks = 2.002 GiB, of which 1,024 usable hold 16,384 tokens",
            "kv_heads": "4 query heads share one: 1/4 of 8.008 GiB",
        }

    def test_without_groups_nothing_is_saved(self) -> None:
        assert HIDDEN_4096.describe(2, num_heads=32)["kv_heads"] == "one for each query head"

    @pytest.mark.parametrize(
        ("count", "text"),
        [
            (0, "0 Bytes"),
            (1, "1 Byte"),
            (1023, "1023 Bytes"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            (50_331_648, "48 MiB"),
            (GIB, "1 GiB"),
            (3 * GIB // 2, "1.5 GiB"),
            (5 * GIB * 1024, "5 TiB"),
        ],
    )
    def test_bytes(self, count: int, text: str) -> None:
        assert describe_bytes(count) == text
