"""How a runner wants its pool's books to be kept, beyond what its engine cares about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvmanager.types import EvictionKind, HashAlgorithm, IndexKind, PoolSpec

if TYPE_CHECKING:
    # The KV manager's processes read these settings too, and do without the engine.
    from model_runner.books import PoolFacts


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The facts of a pool that change no answer: how blocks are named, found, and given up."""

    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256
    index: IndexKind = IndexKind.HASH
    eviction: EvictionKind = EvictionKind.ADAPTIVE

    def spec(self, facts: PoolFacts) -> PoolSpec:
        """The whole of a pool: what the engine declares, and how it is kept."""
        return PoolSpec(
            facts.num_blocks,
            facts.block_size,
            facts.bytes_per_block,
            facts.model_fingerprint,
            self.hash_algorithm,
            self.index,
            self.eviction,
        )


DEFAULT_CACHE = CacheOptions()
