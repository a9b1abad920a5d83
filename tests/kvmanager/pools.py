"""What the tests of the books share: small pools, and what a runner does with them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvmanager import Pool
from kvmanager.news import News
from kvmanager.sequence import Sequence as Live
from kvmanager.types import Allocation, Append, FreeOutcome, IndexKind, PoolSpec

NewsRow = tuple[Live, Sequence[int], int, int, Sequence[int], int]
"""A sequence, its new tokens, its computed tokens, the entries of its table before blocks taken, those, and its ask."""

COMMON = [0] * 16 + [1] * 16 + [2] * 16


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(num_blocks: int = 11, block_size: int = 16, index: IndexKind = IndexKind.HASH, **facts) -> Pool:
    return Pool(PoolSpec(num_blocks, block_size, index=index, **facts))


def prefill(pool: Pool, sequence_id: str, tokens: Sequence[int], **options) -> Allocation:
    """Allocates and commits a whole prompt, as a runner does."""
    allocation = pool.allocate(sequence_id, tokens, **options)
    pool.append([Append(sequence_id, (), len(tokens))])
    return allocation


def columns(rows: Sequence[NewsRow]) -> News:
    """The news of some sequences, as a session tells them."""
    return News(
        [row[0] for row in rows],
        array("I", [len(row[1]) for row in rows]),
        array("I", [token_id for row in rows for token_id in row[1]]),
        array("I", [row[2] for row in rows]),
        array("I", [row[5] for row in rows]),
        array("I", [row[3] for row in rows]),
        array("I", [len(row[4]) for row in rows]),
        array("I", [block for row in rows for block in row[4]]),
    )


def end(pool: Pool, *sequence_ids: str) -> FreeOutcome:
    return pool.free([Append(sequence_id) for sequence_id in sequence_ids])


def cache(pool: Pool, tokens: Sequence[int], **options) -> None:
    """Leaves a prompt behind in the cache."""
    prefill(pool, "cached", tokens, **options)
    end(pool, "cached")


def right(pool: Pool) -> bool:
    assert pool.check().violations == ()
    return pool.imbalance() == 0
