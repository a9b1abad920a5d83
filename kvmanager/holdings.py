"""What a runner says that it holds, and whether it can be true: checked whole before any books are made from it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvmanager.errors import InvalidArgument
from kvmanager.types import BASE_SCOPE, NO_RETENTION, NULL_BLOCK, CacheScope, PoolSpec, Retention
from kvmanager.validation import check_id, check_retention, check_scope


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A live sequence: its tokens and its block table.

    K/V of the first `computed_tokens` tokens is in the blocks; `cached_tokens` of them were found when it began.
    prompt_tokens: tokens, from the first, whose full blocks its retention pins when it ends. promised_tokens: tokens
    behind the computed ones that its next step is certain to compute. skips_cache_write: what it computes is never
    found; what it found itself is.
    """

    sequence_id: str
    token_ids: array[int]
    block_ids: Seq[int]
    computed_tokens: int
    cached_tokens: int = 0
    scope: CacheScope = BASE_SCOPE
    retention: Retention = NO_RETENTION
    prompt_tokens: int = 0
    promised_tokens: int = 0
    skips_cache_write: bool = False


@dataclass(frozen=True, slots=True)
class HeldCache:
    """Full blocks of one scope that can be hit, each after its parent; among others the least recently used first.

    parents: for each the block before it in its chain; NULL_BLOCK for one that begins a prompt. token_ids: a block's
    worth for each. A block of a sequence may be here too, when it holds more than that sequence says.
    """

    scope: CacheScope
    block_ids: Seq[int]
    parents: Seq[int]
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that a runner holds. lease: its spare blocks."""

    sequences: Seq[HeldSequence] = ()
    lease: Seq[int] = ()
    cached: Seq[HeldCache] = ()


def check_holdings(spec: PoolSpec, holdings: Holdings) -> None:
    """Refuses ids out of range, blocks in two places, and sequences that contradict themselves.

    Whether blocks hold what several say of them is seen when their chains are known.
    """
    names: set[str] = set()
    tabled: set[int] = set()
    for sequence in holdings.sequences:
        _check_sequence(spec, sequence)
        if sequence.sequence_id in names:
            raise InvalidArgument(f"the holdings name sequence {sequence.sequence_id!r} twice")
        names.add(sequence.sequence_id)
        tabled.update(sequence.block_ids)
    _check_blocks(spec, holdings.lease, "the lease")
    _refuse_both(tabled.intersection(holdings.lease), "the lease", "a block table")
    listed: set[int] = set()
    for part in holdings.cached:
        _check_cache(spec, part)
        _refuse_both(listed.intersection(part.block_ids), "the cached blocks", "them again")
        listed.update(part.block_ids)
    _refuse_both(listed.intersection(holdings.lease), "the lease", "the cached blocks")


def _check_sequence(spec: PoolSpec, sequence: HeldSequence) -> None:
    check_id("a sequence id", sequence.sequence_id)
    check_scope(sequence.scope)
    check_retention(sequence.retention, sequence.skips_cache_write)
    _check_blocks(spec, sequence.block_ids, f"the block table of sequence {sequence.sequence_id!r}")
    known, room = len(sequence.token_ids), len(sequence.block_ids) * spec.block_size
    computed, cached, prompt = sequence.computed_tokens, sequence.cached_tokens, sequence.prompt_tokens
    promised = sequence.promised_tokens
    if promised < 0 or computed + promised > min(known, room):
        raise InvalidArgument(
            f"sequence {sequence.sequence_id!r} is said to compute {promised} tokens behind {computed} computed ones; "
            f"it has {known} and room for {room}",
            promised_tokens=promised,
            computed_tokens=computed,
            known_tokens=known,
            block_tokens=room,
        )
    if not known or not room or not 0 <= cached <= computed <= min(known, room) or not 0 <= prompt <= known:
        raise InvalidArgument(
            f"sequence {sequence.sequence_id!r} is said to have {known} tokens ({prompt} of its prompt), room for "
            f"{room}, {computed} computed and {cached} found cached: each of the last two must be at most those before",
            known_tokens=known,
            block_tokens=room,
            computed_tokens=computed,
            cached_tokens=cached,
        )


def _check_cache(spec: PoolSpec, part: HeldCache) -> None:
    check_scope(part.scope)
    _check_blocks(spec, part.block_ids, "the cached blocks")
    count = len(part.block_ids)
    if len(part.parents) != count or len(part.token_ids) != count * spec.block_size:
        raise InvalidArgument(
            f"{count} cached blocks come with {len(part.parents)} parents and {len(part.token_ids)} tokens; each has "
            f"one parent and {spec.block_size} tokens",
            blocks=count,
            parents=len(part.parents),
            tokens=len(part.token_ids),
        )


def _check_blocks(spec: PoolSpec, blocks: Seq[int], where: str) -> None:
    if not blocks:
        return
    if min(blocks) <= NULL_BLOCK or max(blocks) >= spec.num_blocks:
        wrong = next(block for block in blocks if not NULL_BLOCK < block < spec.num_blocks)
        raise InvalidArgument(
            f"block {wrong} in {where} is not in 1..{spec.num_blocks - 1}", block=wrong, num_blocks=spec.num_blocks
        )
    if len(set(blocks)) < len(blocks):
        raise InvalidArgument(f"{where} names a block twice", blocks=len(blocks))


def _refuse_both(blocks: set[int], one: str, other: str) -> None:
    if blocks:
        raise InvalidArgument(f"block {min(blocks)} is said to be in {one} and in {other}", block=min(blocks))
