"""What a runner says that it holds, in parts of a bounded size; the books of its pool are made anew from them."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.kv.v1 import kv_manager_pb2 as pb

from services.columns import to_column
from services.session.cached_tree import CachedTree
from services.session.held import Held
from services.session.holding import Holding
from services.session.orders import wire_retention

PART_BYTES = 1 << 20
"""About how large a part may be. A sequence is never cut, so that a very long one makes a larger part of its own."""


def holdings(holding: Holding, part_bytes: int = PART_BYTES) -> Iterator[pb.Holdings]:
    """The report, sequences first; only the last part says that it is the last."""
    part, size = pb.Holdings(lease_block_ids=to_column(holding.lease)), 4 * len(holding.lease)
    for held in holding.live.values():
        sequence = _sequence(held)
        grown = size + sequence.ByteSize()
        if size and grown > part_bytes:
            yield part
            part, grown = pb.Holdings(), sequence.ByteSize()
        part.sequences.append(sequence)
        size = grown
    if size:
        yield part
    for cached in _cached(holding.cached, part_bytes):
        yield pb.Holdings(cached=[cached])
    yield pb.Holdings(last=True)


def _sequence(held: Held) -> pb.HeldSequence:
    return pb.HeldSequence(
        sequence_id=held.sequence_id,
        handle=held.handle,
        token_ids=to_column(held.tokens),
        block_ids=to_column(held.blocks),
        computed_tokens=held.computed,
        cached_tokens=held.cached,
        scope=pb.CacheScope(salt=held.salt),
        retention=wire_retention(held.retention),
        prompt_tokens=held.prompt_tokens,
        promised_tokens=max(0, held.promised - held.computed),
        skip_cache_write=held.skips_cache_write,
    )


def _cached(tree: CachedTree, part_bytes: int) -> Iterator[pb.CachedBlocks]:
    """Runs of blocks of one scope; over all runs, too, a parent comes before its children."""
    blocks: list[int] = []
    parents: list[int] = []
    tokens: list[bytes] = []
    salt, size = "", 0
    for block, cached in tree.in_order():
        if blocks and (cached.salt != salt or size + len(cached.tokens) + 8 > part_bytes):
            yield _run(salt, blocks, parents, tokens)
            blocks, parents, tokens, size = [], [], [], 0
        salt = cached.salt
        blocks.append(block)
        parents.append(cached.parent)
        tokens.append(cached.tokens)
        size += len(cached.tokens) + 8
    if blocks:
        yield _run(salt, blocks, parents, tokens)


def _run(salt: str, blocks: list[int], parents: list[int], tokens: list[bytes]) -> pb.CachedBlocks:
    return pb.CachedBlocks(
        scope=pb.CacheScope(salt=salt),
        block_ids=to_column(blocks),
        parent_block_ids=to_column(parents),
        token_ids=b"".join(tokens),
    )
