"""The facts, requests and answers of a pool, none of which ever changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

NULL_BLOCK: Final = 0
"""The block that is never handed out: the target of padding."""

MAX_BLOCKS: Final = 1 << 24
MAX_BLOCK_SIZE: Final = 1 << 10
MAX_ID_BYTES: Final = 256
MAX_SALT_BYTES: Final = 128
MAX_CHILDREN: Final = 1024
"""Of one fork."""

MAX_SPANS: Final = 4096
MAX_PRIORITY: Final = 100
MAX_PIN_SECONDS: Final = 7 * 24 * 3600.0


class HashAlgorithm(Enum):
    """How blocks are named. XXH3 is fast and not collision resistant: a hit compares tokens, and no salt is taken."""

    SHA256 = "sha256"
    XXH3 = "xxh3"


class IndexKind(Enum):
    """How a prompt's cached prefix is found. NONE caches nothing."""

    HASH = "hash"
    RADIX = "radix"
    NONE = "none"


class EvictionKind(Enum):
    """Which cached block is given up first; always one that no cached block continues."""

    ADAPTIVE = "adaptive"
    LRU = "lru"


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The facts of a pool.

    num_blocks: blocks in the physical cache, the null block included. block_size: tokens in a block, a power of two.
    bytes_per_block: K and V of all layers, 0 when unknown. model_fingerprint: model, weights and cache dtype.
    """

    num_blocks: int
    block_size: int
    bytes_per_block: int = 0
    model_fingerprint: str = ""
    hash_algorithm: HashAlgorithm = HashAlgorithm.SHA256
    index: IndexKind = IndexKind.HASH
    eviction: EvictionKind = EvictionKind.ADAPTIVE

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1


@dataclass(frozen=True, slots=True)
class CacheScope:
    """Whose cache a sequence reads and writes: sequences of different scopes never share a block.

    The salt is a tenant's secret, and names the tenant to quotas; the empty one is everybody's.
    """

    adapter_id: str = ""
    adapter_version: str = ""
    salt: str = ""


BASE_SCOPE: Final = CacheScope()


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """`length` tokens from position `offset` on that stand for an image or the like: equal tokens, other content."""

    content_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Retention:
    """How strongly and how long to keep what a sequence caches.

    priority: 0 to MAX_PRIORITY; blocks of a lower one are given up before any of a higher one. pin_seconds: after the
    sequence has ended, the full blocks of its prompt are not given up for so long.
    """

    priority: int = 0
    pin_seconds: float = 0.0


NO_RETENTION: Final = Retention()


class Append(NamedTuple):
    """What a sequence has computed (`computed_tokens`, from its first token on) and the token ids given since.

    lookahead_tokens: room for so many tokens behind the known ones, so that the next steps need not ask.
    """

    # Each step makes one for each sequence. A frozen dataclass takes more than twice as long to make.

    sequence_id: str
    token_ids: Sequence[int] = ()
    computed_tokens: int = 0
    lookahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """An order to copy the first `num_tokens` slots of block `source` to block `target` before the next write."""

    source: int
    target: int
    num_tokens: int


class Grant(NamedTuple):
    """The blocks from `first_index` of a block table on, which replace what was there, and the copies due first."""

    sequence_id: str
    first_index: int
    block_ids: tuple[int, ...]
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Allocation:
    """The block table of a new sequence; its first `cached_tokens` tokens are in the cache once `copies` are done."""

    block_ids: tuple[int, ...]
    cached_tokens: int
    copies: tuple[BlockCopy, ...] = ()


@dataclass(frozen=True, slots=True)
class Hit:
    """The cached blocks that begin a prompt, and the tokens they hold.

    partial_block: the block whose first slots hold the tokens behind the full blocks; 0, and no tokens, when none does.
    """

    block_ids: tuple[int, ...]
    cached_tokens: int
    partial_block: int = 0


@dataclass(frozen=True, slots=True)
class FreeOutcome:
    """How many of the sequences were live, and how many were unknown."""

    freed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of a prefix: cached blocks that were forgotten, and blocks that stay, held by a sequence."""

    removed_blocks: int
    held_blocks: int


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What the tenant of one salt occupies of its quota, in blocks; quota 0 is no limit."""

    quota_blocks: int
    held_blocks: int
    cached_blocks: int


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks by state (free + cached + held = usable), and tokens: `stored` in held blocks, `reserved` room in them.

    pinned_blocks: cached ones that may not be given up yet. leased_blocks: held ones that are a runner's spares.
    """

    usable_blocks: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    shared_blocks: int
    stored_tokens: int
    reserved_tokens: int
    sequences: int
    pinned_blocks: int = 0
    leased_blocks: int = 0


@dataclass(slots=True)
class Totals:
    """Counts since the pool was opened; they only grow. Units: blocks, tokens for queried/hit, verbs for failures.

    allocated + reused = freed + held: a block is taken fresh, or held again while it was cached. Of the allocation
    failures, quota_failures met a tenant's quota, pin_failures the limit of pins, and all others the end of the pool.
    """

    allocated_blocks: int = 0
    reused_blocks: int = 0
    freed_blocks: int = 0
    evicted_blocks: int = 0
    forks: int = 0
    copies: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    allocation_failures: int = 0
    unknown_frees: int = 0
    removed_blocks: int = 0
    quota_failures: int = 0
    pin_failures: int = 0


@dataclass(frozen=True, slots=True)
class RecentLookups:
    """Sums over the most recent lookups that count in the totals; no lookups at all is not the same as no hits."""

    lookups: int
    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """One entry of a block table as an operator sees it; `block_hash` is empty until the block is full and computed."""

    block_id: int
    reference_count: int
    block_hash: bytes
    stored_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One live sequence as an operator sees it."""

    sequence_id: str
    num_tokens: int
    computed_tokens: int
    cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The outcome of the self-check: one sentence for each violated rule."""

    violations: tuple[str, ...]
    checked_blocks: int
    checked_sequences: int

    @property
    def ok(self) -> bool:
        return not self.violations
