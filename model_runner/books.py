"""The port through which the engine reaches its KV manager; `services` has a gRPC and an in-process implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model_runner.request import NO_RETENTION, Retention

# Words of the KV manager for why it refuses, as far as the engine cares.
SEQUENCE_EXISTS = "SEQUENCE_EXISTS"
INVALID_ARGUMENT = "INVALID_ARGUMENT"
NEVER_FITS = "NEVER_FITS"
PINS_EXHAUSTED = "PINS_EXHAUSTED"
POOL_SHORT = "POOL_SHORT"
QUOTA_SHORT = "QUOTA_SHORT"


class BooksUnreachable(Exception):
    """No answer from the KV manager. What became of the verb is unknown; the engine must open() again."""


class BooksRefused(Exception):
    """The KV manager refuses and says why: other facts of the pool, or what a client or this program asked for.

    reason: the KV manager's word for it, such as SEQUENCE_EXISTS. QUOTA_SHORT is for the moment: the pool has room, but
    not the tenant.
    """

    def __init__(self, sentence: str, reason: str = "") -> None:
        super().__init__(sentence)
        self.reason = reason


class BooksTaken(Exception):
    """Another runner has opened the pool since: it is ours no more, and opening it again would take it from them."""


class BooksLost(Exception):
    """The books of this pool started anew: every block table that the engine has is void."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The pool that the engine declares: num_blocks includes the null block 0; block_size is in tokens."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    model_fingerprint: str


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """One sequence's news: token ids told for the first time, and how many tokens, from its first, have K/V now.

    ahead: room is wanted for so many tokens behind them, whose ids are not known yet.
    """

    sequence_id: str
    token_ids: Sequence[int]
    computed_tokens: int
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy the first `num_tokens` slots of block `source` to block `target` before the next write."""

    source: int
    target: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """The block table of one sequence from index `first_index` on, and the copies to perform before it writes."""

    sequence_id: str
    first_index: int
    block_ids: Sequence[int]
    copies: Sequence[CopyOrder] = ()


@dataclass(frozen=True, slots=True)
class Growth:
    """A grant for each sequence whose block table has changed; and, by id, the sequences that get no word for now.

    A stalled sequence keeps what it holds, must not write, and is asked for again in the next step.
    """

    grants: Sequence[BlockGrant] = ()
    stalled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Admission:
    """The block table of a new sequence; K/V of its first `cached_tokens` tokens is there once `copies` are done."""

    block_ids: Sequence[int]
    cached_tokens: int
    copies: Sequence[CopyOrder] = ()


@dataclass(frozen=True, slots=True)
class AllocationRequest:
    """A new sequence. headroom_blocks must be left for others.

    resumed: it was here before, so the lookup is not counted again. promised_tokens: of the tokens that are not cached,
    the next step computes this many, or all; their full blocks can be hit at once, and an append or a free must follow.
    forks_often: it and its children may be forked after any step, so that they ask for no room ahead.
    skip_cache_write: nothing that it computes can be hit; it has no retention.
    """

    sequence_id: str
    token_ids: Sequence[int]
    headroom_blocks: int = 0
    cache_salt: str = ""
    skip_cache_read: bool = False
    resumed: bool = False
    promised_tokens: int = 0
    retention: Retention = NO_RETENTION
    forks_often: bool = False
    skip_cache_write: bool = False


BOOKS_TROUBLE = (BooksUnreachable, BooksLost, BooksTaken, BooksRefused)
"""All that a verb may raise."""


class KvBooks(Protocol):
    """The verbs of a KV manager, spoken for one pool by one runner. Each succeeds whole or changes nothing.

    Every verb may raise any of BOOKS_TROUBLE. Called from the engine's thread only; may block, but not for long.
    """

    def open(self, facts: PoolFacts) -> None:
        """Declares the pool for a caller that holds nothing in it: whatever it held before ends."""
        ...

    def allocate(self, request: AllocationRequest) -> Admission | None:
        """Blocks for all tokens of a new sequence, cached prefix included; None while the pool is too full."""
        ...

    def append(self, updates: Sequence[SequenceUpdate]) -> Growth | None:
        """Commits and grows the sequences; None, and no block table changed, while the pool is too full for all.

        After None the same news must be told again.
        """
        ...

    def extend(self, updates: Sequence[SequenceUpdate]) -> Growth:
        """append() for tokens that are only guessed, and may be taken back by truncate().

        It waits for nobody, and takes nothing that others can't do without. A sequence that gets no room so is stalled:
        nothing was told of it.
        """
        ...

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Takes back what was told of a sequence behind its first `num_tokens` tokens, none of it computed.

        Its block table ends with the block of the last token that stays.
        """
        ...

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        """Gives each child the parent's block table. Parent and children must append() before they next write."""
        ...

    def free(self, updates: Sequence[SequenceUpdate], *, preempted: bool = False) -> None:
        """Commits a last time and ends the sequences; unknown ones are ignored.

        preempted: they will be back, so that nothing is pinned yet.
        """
        ...

    def flush(self) -> None:
        """A step is scheduled, or time has passed without one: says what is still to be said."""
        ...

    @property
    def away(self) -> str:
        """Why the KV manager can't be asked, in a sentence; empty when it can. Verbs do without as far as they can."""
        ...

    def close(self) -> None:
        """Gives up the pool and the connection; never raises."""
        ...
