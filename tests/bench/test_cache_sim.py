"""The simulator hits what the books and an exact Belady hit; the default policy keeps what it was chosen for."""

from hashlib import blake2b
from pathlib import Path

import pytest

from bench import cache_sim
from bench.cache_sim import belady_hits, hits
from bench.evict import prompts
from kvmanager.adaptive import AdaptiveEviction
from kvmanager.lru import LruEviction

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_trace.jsonl"


@pytest.fixture(scope="module")
def requests() -> list[list[int]]:
    return list(prompts(TRACE))


@pytest.mark.parametrize(
    ("capacity", "lru", "best"), [(1_000, 12_847, 55_019), (3_000, 18_850, 84_953), (10_000, 61_046, 105_710)]
)
def test_published_numbers(requests: list[list[int]], capacity: int, lru: int, best: int) -> None:
    assert hits(LruEviction(capacity + 2), capacity, requests) == lru
    assert belady_hits(capacity, requests) == best


@pytest.mark.parametrize(("capacity", "least"), [(1_000, 22_500), (3_000, 37_500), (10_000, 67_000)])
def test_default_on_the_conversation_trace(requests: list[list[int]], capacity: int, least: int) -> None:
    # A little under what docs/eviction.md reports, so that a change of a constant shows only if it costs.
    assert hits(AdaptiveEviction(capacity + 2), capacity, requests) >= least


@pytest.mark.parametrize("salt", [b"1", b"2", b"3"])
def test_the_names_do_not_decide(requests: list[list[int]], salt: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # They only say which ghosts make way for others.
    def name_of(block_id: int) -> bytes:
        return blake2b(block_id.to_bytes(16, "little"), digest_size=32, salt=salt).digest()

    monkeypatch.setattr(cache_sim, "name_of", name_of)
    assert hits(AdaptiveEviction(10_002), 10_000, requests) >= 68_000


def test_belady_on_a_chain_that_alternates() -> None:
    # Room for three blocks: the best keeps chain 1 and one block of chain 2 or the other way round.
    assert belady_hits(3, [[1, 2], [3, 4], [1, 2], [3, 4]]) == 3


def test_a_request_that_never_fits_changes_nothing() -> None:
    assert hits(LruEviction(5), 3, [[1, 2], [7, 8, 9, 10], [1, 2]]) == 2
