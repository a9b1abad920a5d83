"""A live sequence: its tokens with their hash chain, its block table, and how far it is computed."""

from __future__ import annotations

from kvmanager.hashing import HashChain
from kvmanager.types import SequenceView


class Sequence:
    """`blocks` has one entry for each block_size tokens; K/V of the first `computed` tokens is in the cache.

    owner: the epoch of the runner that writes the blocks; 0 when it was made by hand.
    """

    __slots__ = ("blocks", "cached", "chain", "computed", "owner", "sequence_id")

    def __init__(
        self, sequence_id: str, owner: int, chain: HashChain, blocks: list[int], cached: int, computed: int
    ) -> None:
        self.sequence_id = sequence_id
        self.owner = owner
        self.chain = chain
        self.blocks = blocks
        self.cached = cached
        self.computed = computed

    @property
    def num_tokens(self) -> int:
        return len(self.chain.token_ids)

    def fork(self, child_id: str) -> Sequence:
        """A sequence with the same tokens and an equal block table; the counts are the caller's to raise."""
        return Sequence(child_id, self.owner, self.chain.copy(), self.blocks[:], self.cached, self.computed)

    def view(self) -> SequenceView:
        return SequenceView(self.sequence_id, self.num_tokens, self.computed, self.cached, len(self.blocks))
