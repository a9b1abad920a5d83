"""A live sequence: its tokens with their hash chain, its block table, and how far it is computed."""

from __future__ import annotations

from kvmanager.hashing import HashChain
from kvmanager.tenants import Tenant
from kvmanager.types import Retention, SequenceView


class Sequence:
    """`blocks` is the block table; K/V of the first `computed` tokens is in the cache.

    owner: the epoch of the runner that writes the blocks; 0 when it was made by hand. publishable: the index of the
    first block that can never be published, because its name means something else already; usually far away. Of one
    that skips_cache_write, it is the first that was not found in the cache.
    pinned_blocks: full blocks of the prompt that `retention` will pin. promised_blocks: blocks at the beginning of the
    table that can be found although some of them are not computed; 0 when all are.
    """

    __slots__ = (
        "blocks",
        "cached",
        "chain",
        "computed",
        "owner",
        "pinned_blocks",
        "promised_blocks",
        "publishable",
        "retention",
        "sequence_id",
        "skips_cache_write",
        "tenant",
    )

    def __init__(
        self,
        sequence_id: str,
        owner: int,
        chain: HashChain,
        blocks: list[int],
        cached: int,
        tenant: Tenant,
        retention: Retention,
        publishable: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.owner = owner
        self.chain = chain
        self.blocks = blocks
        self.cached = cached
        self.computed = cached
        self.tenant = tenant
        self.retention = retention
        self.publishable = publishable
        self.skips_cache_write = False
        self.pinned_blocks = 0
        self.promised_blocks = 0

    @property
    def num_tokens(self) -> int:
        return len(self.chain.token_ids)

    def fork(self, child_id: str) -> Sequence:
        """A sequence with the same tokens and an equal block table; the counts are the caller's to raise.

        It pins nothing: the parent pins the prompt for all.
        """
        child = Sequence(
            child_id,
            self.owner,
            self.chain.copy(),
            self.blocks[:],
            self.cached,
            self.tenant,
            Retention(self.retention.priority),
            self.publishable,
        )
        child.computed = self.computed
        child.skips_cache_write = self.skips_cache_write
        return child

    def view(self) -> SequenceView:
        return SequenceView(self.sequence_id, self.num_tokens, self.computed, self.cached, len(self.blocks))
