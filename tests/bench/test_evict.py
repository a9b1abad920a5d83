"""LRU on a public trace hits exactly what an independent LRU hits."""

from pathlib import Path

import pytest

from bench.evict import Replay, replay

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_trace.jsonl"


@pytest.mark.parametrize(
    ("capacity", "hits"), [(1_000, 12_847), (3_000, 18_850), (10_000, 61_046), (30_000, 93_978), (100_000, 104_924)]
)
def test_lru_hits(capacity: int, hits: int) -> None:
    assert replay(TRACE, capacity) == Replay(hits, 288_500)
