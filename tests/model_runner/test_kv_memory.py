"""The arithmetic of K/V memory, at published figures."""

from __future__ import annotations

import pytest

from model_runner.kv_memory import KvMemory, describe_bytes

GIB = 1 << 30
# Hidden size 4096 as 32 heads of 128, 32 layers, float16.
SEVEN_B = KvMemory(num_layers=32, num_kv_heads=32, head_dim=128, element_bytes=2, block_size=16)
SEVEN_B_GQA = KvMemory(num_layers=32, num_kv_heads=8, head_dim=128, element_bytes=2, block_size=16)


def test_bytes_of_a_token_and_of_a_block() -> None:
    assert SEVEN_B.bytes_per_token == 524_288
    assert SEVEN_B.bytes_per_block == 8_388_608


def test_a_hundred_thousand_tokens() -> None:
    assert SEVEN_B.blocks_for_tokens(100_000) == 6_250 + 1
    assert 100_000 * SEVEN_B.bytes_per_token / GIB == pytest.approx(48.8, abs=0.05)
    assert 100_000 * SEVEN_B_GQA.bytes_per_token / GIB == pytest.approx(12.2, abs=0.05)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 2), (16, 2), (17, 3), (512, 33), (513, 34)])
def test_blocks_for_a_sequence_include_the_null_block(tokens: int, blocks: int) -> None:
    assert SEVEN_B.blocks_for_tokens(tokens) == blocks


@pytest.mark.parametrize(("budget", "blocks"), [(GIB, 128), (GIB - 1, 127), (2 * 8_388_608, 2)])
def test_a_budget_buys_whole_blocks(budget: int, blocks: int) -> None:
    assert SEVEN_B.blocks_for_budget(budget) == blocks


def test_a_budget_for_no_usable_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"8 MiB.*at least 2.*16 MiB"):
        SEVEN_B.blocks_for_budget(2 * 8_388_608 - 1)


def test_the_line_in_the_log_has_all_factors_and_results() -> None:
    line = SEVEN_B.describe(128)
    for part in ("32 layers", "32 KV heads", "128", "2 B", "524,288 B", "8 MiB", "128 blocks", "1 GiB", "127", "2,032"):
        assert part in line


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (50_331_648, "48 MiB"), (3 * GIB // 2, "1.5 GiB")],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert describe_bytes(count) == text
