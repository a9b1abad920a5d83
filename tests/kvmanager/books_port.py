"""How the machine of the books calls a pool: the same calls in-process and over a wire, with the same errors.

A port over a wire turns each call into a request, each refusal back into the error of kvmanager.errors, and may answer
None to what a wire does not show: `index_tree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Protocol

from kvmanager.errors import KvError
from kvmanager.events import EventLog, IndexEvent
from kvmanager.runner_pool import RunnerPool
from kvmanager.types import (
    Allocation,
    Append,
    CacheScope,
    ContentSpan,
    FreeOutcome,
    Grant,
    Hit,
    IndexKind,
    Occupancy,
    PoolSpec,
    Removal,
    Retention,
    TenantUsage,
)
from tests.kvmanager.pools import columns

OWNER = 7
STRANGER = 8
Spans = Sequence[ContentSpan]
Tokens = Sequence[int]
Views = tuple[int, list[tuple[int, bytes]]]
"""Computed tokens, and the block table as (block, name); the name is empty for one that can't be found."""


Row = tuple[str, Tokens, int, int, Sequence[int], int]
"""A sequence, its new tokens, its computed tokens, the entries of its table before blocks taken, those, and its ask."""


class BooksPort(Protocol):
    """The verbs of a pool; those of a lease only where `has_lease` is true.

    `epoch` is the caller's: OWNER has made every sequence.
    """

    has_lease: bool

    def allocate(
        self,
        sequence_id: str,
        tokens: Tokens,
        scope: CacheScope,
        spans: Spans,
        retention: Retention,
        headroom_blocks: int,
        lookahead_tokens: int,
        skip_cache_read: bool,
        resumed: bool,
        promised_tokens: int = 0,
        skip_cache_write: bool = False,
    ) -> Allocation: ...
    def append(self, appends: Sequence[Append], epoch: int = OWNER) -> list[Grant]: ...
    def fork(self, parent: str, children: Sequence[str], epoch: int = OWNER) -> tuple[int, ...]: ...
    def truncate(self, sequence_id: str, num_tokens: int, epoch: int = OWNER) -> int: ...
    def free(self, frees: Sequence[Append], preempted: bool = False, epoch: int = OWNER) -> FreeOutcome: ...
    def fill_lease(self, wanted: int) -> list[int]: ...
    def give_back(self, blocks: list[int]) -> None: ...
    def progress(self, rows: Sequence[Row]) -> tuple[list[Grant], list[type[KvError]]]: ...
    def lookup(self, tokens: Tokens, scope: CacheScope, spans: Spans) -> Hit: ...
    def reset_cache(self) -> int: ...
    def remove_prefix(self, tokens: Tokens, scope: CacheScope, spans: Spans) -> Removal: ...
    def set_quota(self, salt: str, blocks: int) -> None: ...
    def set_default_quota(self, blocks: int) -> None: ...
    def views(self, sequence_id: str) -> Views: ...
    def occupancy(self) -> Occupancy: ...
    def totals(self) -> dict[str, int]: ...
    def tenant_usage(self, salt: str) -> TenantUsage: ...
    def events(self, number: int) -> list[IndexEvent]: ...
    def violations(self) -> tuple[str, ...]: ...
    def index_tree(self) -> dict[bytes, bytes] | None: ...
    def advance(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class InProcessPort:
    """A pool of this process with a clock of its own."""

    has_lease = True

    def __init__(self, spec: PoolSpec) -> None:
        self.now = 0.0
        self.pool = RunnerPool(spec, lambda: self.now, EventLog(kept=1 << 20))

    def allocate(
        self,
        sequence_id: str,
        tokens: Tokens,
        scope: CacheScope,
        spans: Spans,
        retention: Retention,
        headroom_blocks: int,
        lookahead_tokens: int,
        skip_cache_read: bool,
        resumed: bool,
        promised_tokens: int = 0,
        skip_cache_write: bool = False,
    ) -> Allocation:
        return self.pool.allocate(
            sequence_id,
            tokens,
            scope=scope,
            spans=spans,
            retention=retention,
            headroom_blocks=headroom_blocks,
            lookahead_tokens=lookahead_tokens,
            skip_cache_read=skip_cache_read,
            resumed=resumed,
            promised_tokens=promised_tokens,
            skip_cache_write=skip_cache_write,
            caller=OWNER,
        )

    def append(self, appends: Sequence[Append], epoch: int = OWNER) -> list[Grant]:
        return self.pool.append(appends, caller=epoch)

    def fork(self, parent: str, children: Sequence[str], epoch: int = OWNER) -> tuple[int, ...]:
        return self.pool.fork(parent, children, caller=epoch)

    def truncate(self, sequence_id: str, num_tokens: int, epoch: int = OWNER) -> int:
        return self.pool.truncate(sequence_id, num_tokens, caller=epoch)

    def free(self, frees: Sequence[Append], preempted: bool = False, epoch: int = OWNER) -> FreeOutcome:
        return self.pool.free(frees, preempted=preempted, caller=epoch)

    def fill_lease(self, wanted: int) -> list[int]:
        return self.pool.fill_lease(wanted)

    def give_back(self, blocks: list[int]) -> None:
        self.pool.give_back(blocks)

    def progress(self, rows: Sequence[Row]) -> tuple[list[Grant], list[type[KvError]]]:
        news = [(self.pool.sequence(row[0]), *row[1:]) for row in rows]
        grants, refused = self.pool.answer(columns(news))
        assert self.pool.check().violations == ()
        self.pool.settle()
        return grants, [type(error) for _, error in refused]

    def lookup(self, tokens: Tokens, scope: CacheScope, spans: Spans) -> Hit:
        return self.pool.lookup(tokens, scope, spans)

    def reset_cache(self) -> int:
        return self.pool.reset_cache()

    def remove_prefix(self, tokens: Tokens, scope: CacheScope, spans: Spans) -> Removal:
        return self.pool.remove_prefix(tokens, scope, spans)

    def set_quota(self, salt: str, blocks: int) -> None:
        self.pool.set_quota(salt, blocks)

    def set_default_quota(self, blocks: int) -> None:
        self.pool.set_default_quota(blocks)

    def views(self, sequence_id: str) -> Views:
        sequence, blocks = self.pool.block_table(sequence_id)
        return sequence.computed_tokens, [(view.block_id, view.block_hash) for view in blocks]

    def occupancy(self) -> Occupancy:
        return self.pool.occupancy()

    def totals(self) -> dict[str, int]:
        return {field.name: getattr(self.pool.totals, field.name) for field in fields(self.pool.totals)}

    def tenant_usage(self, salt: str) -> TenantUsage:
        return self.pool.tenant_usage(salt)

    def events(self, number: int) -> list[IndexEvent]:
        events = self.pool.events.since(number)
        assert events is not None, f"the events from {number} on are kept no more"
        return events

    def violations(self) -> tuple[str, ...]:
        imbalance = self.pool.imbalance()
        return self.pool.check().violations + ((f"the sums are off by {imbalance}",) if imbalance else ())

    def index_tree(self) -> dict[bytes, bytes]:
        index = self.pool.block_pool.index
        return {name: index.names[index.parent(block)] for name, block in index.owners().items()}

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        """Nothing is open."""


class TwinPort(InProcessPort):
    """A radix pool beside a hash pool that is told the same: they differ in nothing but what is found inside a block.

    Partial hits neither publish nor give up anything, so even the block tables are equal.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.hash = InProcessPort(replace(spec, index=IndexKind.HASH))
        super().__init__(replace(spec, index=IndexKind.RADIX))
        self._size = spec.block_size

    def _equal(self, answer: Hit | Allocation, twin: Hit | Allocation) -> None:
        assert answer.cached_tokens // self._size == twin.cached_tokens // self._size
        assert twin.cached_tokens % self._size == 0
        assert 0 <= answer.cached_tokens - twin.cached_tokens < self._size
        assert answer.block_ids == twin.block_ids

    def _as_before(self, verb: str, *arguments: object, **options: object) -> object:
        """Calls the hash pool; a refusal is returned."""
        try:
            return getattr(self.hash, verb)(*arguments, **options)
        except KvError as error:
            return error

    def _told_both(self, verb: str, *arguments: object, **options: object) -> object:
        """Calls both pools and raises what both raise. Returns the hash pool's answer."""
        twin = self._as_before(verb, *arguments, **options)
        try:
            answer = getattr(InProcessPort, verb)(self, *arguments, **options)
        except KvError as error:
            if type(twin) is not type(error):
                raise AssertionError(f"the hash pool says {twin!r}") from error
            raise
        assert not isinstance(twin, KvError), twin
        return answer, twin

    def allocate(self, *arguments: object) -> Allocation:
        answer, twin = self._told_both("allocate", *arguments)
        self._equal(answer, twin)
        assert twin.copies == ()
        return answer

    def append(self, appends: Sequence[Append], epoch: int = OWNER) -> list[Grant]:
        answer, twin = self._told_both("append", appends, epoch)
        tables = [(grant.sequence_id, grant.first_index, grant.block_ids) for grant in answer]
        assert tables == [(grant.sequence_id, grant.first_index, grant.block_ids) for grant in twin]
        return answer

    def fork(self, parent: str, children: Sequence[str], epoch: int = OWNER) -> tuple[int, ...]:
        return self._equally("fork", parent, children, epoch)

    def truncate(self, sequence_id: str, num_tokens: int, epoch: int = OWNER) -> int:
        return self._equally("truncate", sequence_id, num_tokens, epoch)

    def free(self, frees: Sequence[Append], preempted: bool = False, epoch: int = OWNER) -> FreeOutcome:
        return self._equally("free", frees, preempted, epoch)

    def lookup(self, tokens: Tokens, scope: CacheScope, spans: Spans) -> Hit:
        answer, twin = self._told_both("lookup", tokens, scope, spans)
        self._equal(answer, twin)
        return answer

    def fill_lease(self, wanted: int) -> list[int]:
        return self._equally("fill_lease", wanted)

    def give_back(self, blocks: list[int]) -> None:
        self._equally("give_back", blocks)

    def progress(self, rows: Sequence[Row]) -> tuple[list[Grant], list[type[KvError]]]:
        (grants, refused), (twins, twins_refused) = self._told_both("progress", rows)
        tables = [(grant.sequence_id, grant.first_index, grant.block_ids) for grant in grants]
        assert tables == [(grant.sequence_id, grant.first_index, grant.block_ids) for grant in twins]
        assert refused == twins_refused
        return grants, refused

    def reset_cache(self) -> int:
        return self._equally("reset_cache")

    def remove_prefix(self, tokens: Tokens, scope: CacheScope, spans: Spans) -> Removal:
        return self._equally("remove_prefix", tokens, scope, spans)

    def set_quota(self, salt: str, blocks: int) -> None:
        self._equally("set_quota", salt, blocks)

    def set_default_quota(self, blocks: int) -> None:
        self._equally("set_default_quota", blocks)

    def events(self, number: int) -> list[IndexEvent]:
        events = super().events(number)
        assert events == self.hash.events(number)
        return events

    def violations(self) -> tuple[str, ...]:
        return super().violations() + self.hash.violations()

    def index_tree(self) -> dict[bytes, bytes]:
        tree = super().index_tree()
        assert tree == self.hash.index_tree()
        return tree

    def advance(self, seconds: float) -> None:
        super().advance(seconds)
        self.hash.advance(seconds)

    def _equally(self, verb: str, *arguments: object):
        answer, twin = self._told_both(verb, *arguments)
        assert answer == twin
        return answer
