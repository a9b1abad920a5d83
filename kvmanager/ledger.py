"""What a pool consists of, and what can be asked of it without changing anything."""

from __future__ import annotations

import bisect
from collections.abc import Sequence as Seq

from kvmanager.adaptive import AdaptiveEviction
from kvmanager.blocks import BlockPool
from kvmanager.check import check_pool
from kvmanager.clock import Clock, no_time
from kvmanager.errors import InvalidArgument, UnknownSequence
from kvmanager.events import EventKind, EventLog, IndexEvent
from kvmanager.hash_index import CheckedHashIndex, HashIndex, NoIndex
from kvmanager.hashing import HashChain
from kvmanager.hit_window import HitWindow
from kvmanager.lease import Lease
from kvmanager.lru import LruEviction
from kvmanager.policy import EvictionPolicy
from kvmanager.prefix_index import NO_NAME, PrefixIndex
from kvmanager.radix_index import RadixIndex
from kvmanager.residency import Residency
from kvmanager.sequence import Sequence
from kvmanager.types import (
    BASE_SCOPE,
    BlockView,
    CacheScope,
    CheckReport,
    ContentSpan,
    EvictionKind,
    HashAlgorithm,
    Hit,
    IndexKind,
    Occupancy,
    PoolSpec,
    SequenceView,
    TenantUsage,
    Totals,
)
from kvmanager.validation import check_scope, check_spans, check_spec, parse_token_ids


class Ledger:
    """The state of one pool and its read-only verbs. Not thread-safe: one owner calls it.

    clock: seconds that only grow, for pins and residency; a pool without one pins for ever. events: where changes of
    the index go.
    """

    def __init__(self, spec: PoolSpec, clock: Clock = no_time, events: EventLog | None = None) -> None:
        check_spec(spec)
        self.spec = spec
        self.clock = clock
        self.totals = Totals()
        self.caches = spec.index is not IndexKind.NONE
        self.recent = HitWindow()
        """The lookups that the totals counted last."""
        self.events = EventLog() if events is None else events
        self.block_pool = BlockPool(
            spec.num_blocks,
            spec.block_size,
            _policy(spec, Residency(spec.num_blocks, clock)),
            _index(spec),
            self.totals,
            self.events,
        )
        self.live: dict[str, Sequence] = {}
        self.lease = Lease()
        self.table_entries = 0
        """Entries of all block tables, the lease among them; equals the sum of all counts."""
        self.promised_pins = 0
        """Blocks that live sequences will pin when they end."""

    def lookup(self, token_ids: Seq[int], scope: CacheScope = BASE_SCOPE, spans: Seq[ContentSpan] = ()) -> Hit:
        """What allocate() would find cached now."""
        chain = self._chain(token_ids, scope, spans)
        hits = self._match(chain)
        partial_block, partial_tokens = self._match_inside(chain, hits)
        return Hit(tuple(hits), len(hits) * self.spec.block_size + partial_tokens, partial_block)

    def sequence(self, sequence_id: str) -> Sequence:
        """The live sequence. Raises UnknownSequence."""
        sequence = self.live.get(sequence_id)
        if sequence is None:
            raise UnknownSequence(
                f"no live sequence {sequence_id!r} among {len(self.live)}; it has ended or never began",
                sequence_id=sequence_id,
                sequences=len(self.live),
            )
        return sequence

    def block_table(self, sequence_id: str) -> tuple[SequenceView, list[BlockView]]:
        """The sequence and its blocks in order. Raises UnknownSequence."""
        sequence = self.sequence(sequence_id)
        size = self.spec.block_size
        views = [
            BlockView(
                block,
                self.block_pool.counts[block],
                self.block_pool.index.names[block],
                min(size, max(0, sequence.computed - index * size)),
            )
            for index, block in enumerate(sequence.blocks)
        ]
        return sequence.view(), views

    def sequences(self, after: str = "", limit: int = 100) -> list[SequenceView]:
        """The first `limit` live sequences by id whose ids come after `after`."""
        ids = sorted(self.live)
        start = bisect.bisect_right(ids, after)
        return [self.live[sequence_id].view() for sequence_id in ids[start : start + limit]]

    def occupancy(self) -> Occupancy:
        """Blocks by state, and tokens; O(1)."""
        blocks = self.block_pool
        return Occupancy(
            blocks.usable,
            len(blocks.free),
            blocks.cached,
            blocks.held,
            blocks.shared,
            blocks.stored_tokens,
            blocks.held * self.spec.block_size,
            len(self.live),
            blocks.pins.idle,
            len(self.lease),
        )

    @property
    def residency(self) -> Residency:
        """How long cached content lives."""
        return self.block_pool.policy.residency

    def tenant_usage(self, salt: str = "") -> TenantUsage:
        """What the tenant of a salt occupies; the base tenant for none."""
        check_scope(CacheScope(salt=salt))
        tenants = self.block_pool.tenants
        tenant = tenants.find(salt)
        if tenant is None:
            return TenantUsage(tenants.quota(salt), 0, 0)
        return TenantUsage(tenant.quota, tenant.held, tenant.cached)

    def snapshot(self) -> list[IndexEvent]:
        """All that can be found, as events of the log's last number, parents before children; O(blocks)."""
        number, names = self.events.last_number, self.block_pool.index.names
        tree = self.block_pool.index.tree()
        roots = tree.get(NO_NAME, [])
        due = [(NO_NAME, block, self.events.adapters.get(names[block], ("", ""))) for block in roots]
        chains: list[IndexEvent] = []
        while due:
            parent, block, adapter = due.pop()
            run = [names[block]]
            following = tree.get(run[-1], [])
            while len(following) == 1:
                run.append(names[following[0]])
                following = tree.get(run[-1], [])
            chains.append(IndexEvent(number, EventKind.STORED, tuple(run), parent, adapter[0], adapter[1]))
            due += [(run[-1], child, adapter) for child in following]
        return chains

    def check(self) -> CheckReport:
        """Recomputes everything that is derived and compares; O(blocks + table entries)."""
        leased = self.lease.members()
        violations = check_pool(self.block_pool, self.live, leased, self.table_entries, self.promised_pins)
        return CheckReport(tuple(violations), self.spec.num_blocks, len(self.live))

    def imbalance(self) -> int:
        """How far the sums are off: free + cached + held against usable, and counts against table entries; O(1)."""
        blocks = self.block_pool
        states = len(blocks.free) + blocks.cached + blocks.held
        return abs(states - blocks.usable) + abs(blocks.references - self.table_entries)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.spec.block_size)

    def _chain(self, token_ids: Seq[int], scope: CacheScope, spans: Seq[ContentSpan]) -> HashChain:
        check_scope(scope)
        tokens = parse_token_ids(token_ids)
        if not tokens:
            raise InvalidArgument("the prompt has no tokens; it needs at least 1", num_tokens=0)
        if scope.salt and self.spec.hash_algorithm is HashAlgorithm.XXH3:
            raise InvalidArgument(
                "this pool names blocks by xxh3, which can be made to collide, and takes no cache salt; open it with "
                "sha256 to part tenants"
            )
        check_spans(spans, len(tokens))
        return HashChain(tokens, self.spec.block_size, scope, tuple(spans), self.spec.hash_algorithm)

    def _match(self, chain: HashChain) -> list[int]:
        # The last token is always computed: its logits are what the caller is after.
        return self.block_pool.index.match(chain, (len(chain.token_ids) - 1) // self.spec.block_size)

    def _match_inside(self, chain: HashChain, hits: list[int]) -> tuple[int, int]:
        left = len(chain.token_ids) - 1 - len(hits) * self.spec.block_size
        # A copy is made before the step: what the step is yet to compute can't be its source.
        return self.block_pool.index.match_inside(
            chain, hits, min(left, self.spec.block_size), self.block_pool.promised
        )


def _policy(spec: PoolSpec, residency: Residency) -> EvictionPolicy:
    if spec.eviction is EvictionKind.LRU:
        return LruEviction(spec.num_blocks, residency)
    return AdaptiveEviction(spec.num_blocks, residency)


def _index(spec: PoolSpec) -> PrefixIndex:
    if spec.index is IndexKind.RADIX:
        return RadixIndex(spec.num_blocks, spec.hash_algorithm is HashAlgorithm.XXH3)
    if spec.index is IndexKind.NONE:
        return NoIndex(spec.num_blocks)
    if spec.hash_algorithm is HashAlgorithm.XXH3:
        return CheckedHashIndex(spec.num_blocks)
    return HashIndex(spec.num_blocks)
