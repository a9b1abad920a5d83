"""What a start says of K/V memory, for the shape of Llama 3 8B, with numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from bench.gpu.place import LLAMA_3_8B, TINY
from bench.gpu.random_model import random_model
from model_runner.kv_scales import KvScales
from services.config import ModelRunnerSettings
from services.model_setup import Setup, set_up_model

CPU = torch.device("cpu")
SCALES = KvScales((0.5,) * 32, (0.25,) * 32)


def started(**given: Any) -> Setup:
    """A start whose weights are another, small model's; all that is said of K/V is the large one's."""
    loaded = replace(random_model(TINY, torch.float16, CPU), config=LLAMA_3_8B, kv_scales=SCALES)
    settings = ModelRunnerSettings(
        log_format="console", device="cpu", attention_backend="reference", block_size=16, num_blocks=129, **given
    )
    with mock.patch("services.model_setup.load_model", return_value=loaded):
        return set_up_model(settings)


@pytest.mark.parametrize(
    ("given", "lines", "block"),
    [
        # 2 (K and V) x 8 heads x 128 x 2 bytes = 4,096; x 32 = 131,072; x 16 = 2 MiB; 128 x 16 = 2,048 tokens;
        # 129 x 2 MiB = 258 MiB, and four times as much, 1,032 MiB, if each of 32 heads had K/V of its own.
        (
            {},
            [
                "kv of a token: 2 (K, V) x 8 KV heads x 128 x 2 B = 4,096 B a layer; x 32 layers = 131,072 B",
                "kv of a block: x 16 tokens = 2 MiB",
                "kv cache: 129 blocks = 258 MiB, of which 128 usable hold 2,048 tokens",
                "kv heads: 4 query heads share one: 1/4 of 1.008 GiB",
            ],
            2 << 20,
        ),
        # A byte each; scales are numbers of the host.
        (
            {"kv_dtype": "fp8_e4m3"},
            [
                "kv scales: checkpoint: K 0.5, V 0.25",
                "kv of a token: 2 (K, V) x 8 KV heads x 128 x 1 B = 2,048 B a layer; x 32 layers = 65,536 B",
                "kv of a block: x 16 tokens = 1 MiB",
                "kv cache: 129 blocks = 129 MiB, of which 128 usable hold 2,048 tokens",
                "kv heads: 4 query heads share one: 1/4 of 516 MiB",
            ],
            1 << 20,
        ),
    ],
)
def test_the_table_of_a_start(
    given: dict[str, Any], lines: list[str], block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = started(**given)
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("kv ")] == lines
    # What is said is what there is, and what the KV manager is told.
    assert setup.backend.cache_bytes == 129 * block
    assert (setup.options.facts.num_blocks, setup.options.facts.bytes_per_block) == (129, block)
    assert setup.describe("p").kv_bytes_per_token == block // 16
