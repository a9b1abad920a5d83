"""LRU on a public trace hits exactly what an independent LRU hits."""

from pathlib import Path

import pytest

from bench.evict import Policy, Replay, replay
from kvmanager.types import EvictionKind, PoolSpec

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_trace.jsonl"


@pytest.mark.parametrize(
    ("capacity", "hits"), [(1_000, 12_847), (3_000, 18_850), (10_000, 61_046), (30_000, 93_978), (100_000, 104_924)]
)
def test_lru_hits(capacity: int, hits: int) -> None:
    assert replay(TRACE, capacity, Policy.LRU) == Replay(hits, 288_500)


@pytest.mark.parametrize("capacity", [50_000, 100_000])
def test_the_default_is_lru_where_a_pool_is_filled_too_few_times_to_learn(capacity: int) -> None:
    assert replay(TRACE, capacity).hits == replay(TRACE, capacity, Policy.LRU).hits


def test_the_default_closes_a_quarter_of_the_gap_between_lru_and_the_best_possible() -> None:
    assert replay(TRACE, 3_000).hits > 18_850 + (84_953 - 18_850) / 4


def test_a_prompt_too_large_for_the_pool_hits_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # Ids of any size, and a blank line at the end. The pool has room for 3 cached blocks.
    lines = [[7, 2**63], [1, 2, 3, 4, 5], [7, 2**63, 9]]
    trace.write_text("".join(f'{{"hash_ids": {each}}}\n' for each in lines) + "\n")
    assert replay(trace, 3, Policy.LRU) == Replay(hits=2, blocks=10, refused=1)


def test_the_default_policy_is_the_pools() -> None:
    assert Policy.DEFAULT.kind is PoolSpec(2, 16).eviction is EvictionKind.ADAPTIVE
