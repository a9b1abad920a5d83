"""The proof of the books: recomputes what is derived, from block tables and names alone, and says what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kvmanager.blocks import BlockPool
from kvmanager.sequence import Sequence
from kvmanager.types import NULL_BLOCK


def check_pool(blocks: BlockPool, live: Mapping[str, Sequence], table_entries: int) -> list[str]:
    """One sentence for each contradiction; none when the books are right. Changes nothing."""
    return [
        *_check_counts(blocks, live, table_entries),
        *_check_states(blocks),
        *_check_sums(blocks),
        *_check_index(blocks),
        *_check_sequences(blocks, live),
    ]


def _check_counts(blocks: BlockPool, live: Mapping[str, Sequence], table_entries: int) -> Iterator[str]:
    entries = Counter(block for sequence in live.values() for block in sequence.blocks)
    for block, count in enumerate(blocks.counts):
        if count != entries[block]:
            holders = sorted(name for name, sequence in live.items() if block in sequence.blocks)
            yield f"block {block} has count {count}, but {entries[block]} table entries name it (sequences {holders})"
    if (total := entries.total()) != table_entries:
        yield f"{total} block-table entries exist, but {table_entries} are counted"
    if NULL_BLOCK in entries:
        yield f"the null block {NULL_BLOCK} is in a block table"


def _check_states(blocks: BlockPool) -> Iterator[str]:
    free, cached = Counter(blocks.free), Counter(blocks.cached)
    if len(blocks.cached) != cached.total():
        yield f"{cached.total()} blocks are in the eviction order, but its length reads {len(blocks.cached)}"
    for block in range(1, len(blocks.counts)):
        held = blocks.counts[block] > 0
        if (times := free[block] + cached[block] + held) != 1:
            yield (
                f"block {block} is in {times} states: {free[block]} times free, {cached[block]} times cached, "
                f"count {blocks.counts[block]}"
            )
        if free[block] and (blocks.names[block] is not None or blocks.stored[block]):
            yield f"free block {block} still has a name or {blocks.stored[block]} stored tokens"
        if cached[block] and blocks.names[block] is None:
            yield f"cached block {block} has no name, so no prompt can hit it"
    if free[NULL_BLOCK] or cached[NULL_BLOCK] or blocks.names[NULL_BLOCK] is not None:
        yield f"the null block {NULL_BLOCK} is free, cached or named"


def _check_sums(blocks: BlockPool) -> Iterator[str]:
    held = [block for block, count in enumerate(blocks.counts) if count > 0]
    facts = {
        "held": (blocks.held, len(held)),
        "shared": (blocks.shared, sum(1 for block in held if blocks.counts[block] > 1)),
        "references": (blocks.references, sum(blocks.counts)),
        "stored tokens": (blocks.stored_tokens, sum(blocks.stored[block] for block in held)),
        "allocated + reused - freed": (
            blocks.totals.allocated_blocks + blocks.totals.reused_blocks - blocks.totals.freed_blocks,
            len(held),
        ),
        "free + cached + held": (len(blocks.free) + len(blocks.cached) + len(held), blocks.usable),
    }
    for what, (kept, recomputed) in facts.items():
        if kept != recomputed:
            yield f"{what} is kept as {kept}, but counting gives {recomputed}"


def _check_index(blocks: BlockPool) -> Iterator[str]:
    owners, spares = dict(blocks.index.owners()), list(blocks.index.spares())
    for name, block in owners.items():
        if blocks.names[block] != name:
            yield f"the index finds block {block} under {name.hex()[:16]}, which is not its name"
    for name, block in spares:
        if blocks.names[block] != name or owners.get(name, block) == block:
            yield f"block {block} is a spare under {name.hex()[:16]} and should not be"
        if not blocks.counts[block]:
            yield f"spare block {block} is held by nobody"
    findable = Counter(owners.values()) + Counter(block for _, block in spares)
    for block, own_name in enumerate(blocks.names):
        if findable[block] != (own_name is not None):
            shown = own_name.hex()[:16] if own_name else "none"
            yield f"block {block} is {findable[block]} times in the index, its name is {shown}"


def _check_sequences(blocks: BlockPool, live: Mapping[str, Sequence]) -> Iterator[str]:
    size = blocks.block_size
    for sequence_id, sequence in live.items():
        room = len(sequence.blocks) * size
        if not sequence.cached <= sequence.computed <= min(sequence.num_tokens, room):
            yield (
                f"sequence {sequence_id!r} has {sequence.cached} cached and {sequence.computed} computed of "
                f"{sequence.num_tokens} tokens, and blocks for {room}"
            )
        for index in range(sequence.computed // size):
            block = sequence.blocks[index]
            if blocks.names[block] != sequence.chain.name(index):
                yield f"block {block}, entry {index} of sequence {sequence_id!r}, is not published under its hash"
            if blocks.stored[block] != size:
                yield f"block {block} of sequence {sequence_id!r} is full, but {blocks.stored[block]} tokens are stored"
