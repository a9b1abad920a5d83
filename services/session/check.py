"""The holding's self-check: recomputes what is derived, and says what does not add up."""

from __future__ import annotations

from collections import Counter

from services.session.held import Held
from services.session.holding import Holding


def violations(holding: Holding) -> list[str]:
    """One sentence for each rule that is broken; O(blocks + tokens)."""
    found = [sentence for held in holding.live.values() for sentence in _of_sequence(holding, held)]
    return [*found, *_of_blocks(holding), *_of_tree(holding)]


def _of_sequence(holding: Holding, held: Held) -> list[str]:
    name, room = held.sequence_id, len(held.blocks) * holding.block_size
    rules = {
        f"{name!r} has {held.computed} computed tokens of {len(held.tokens)} in room for {room}": held.computed
        <= min(len(held.tokens), room),
        f"{name!r} has shown {held.shown} of {len(held.blocks)} blocks": held.shown <= len(held.blocks),
        f"{name!r} has told {held.told} and sent {held.sent} of {len(held.tokens)} tokens": max(held.told, held.sent)
        <= len(held.tokens),
        f"{name!r} names a block twice": len(set(held.blocks)) == len(held.blocks),
        f"{name!r} is not found by its handle": holding.by_handle.get(held.handle) is held,
        f"{name!r} waits for a copy that it did not ask for": not held.copy_due or bool(held.asked or held.wants),
    }
    return [sentence for sentence, holds in rules.items() if not holds]


def _of_blocks(holding: Holding) -> list[str]:
    """Each block is in one place: tables, lease, or cached and idle."""
    counts = Counter(block for held in holding.live.values() for block in held.blocks)
    places = Counter([*counts, *holding.lease, *holding.cached.blocks])
    found = [f"block {block} is in {times} places" for block, times in places.items() if times > 1]
    wrong = [block for block, count in enumerate(holding.counts) if count != counts[block]]
    if holding.held_blocks != len(counts):
        found.append(f"{holding.held_blocks} blocks are counted as held, and {len(counts)} are in tables")
    found += [f"block {block} counts {holding.counts[block]} and is in {counts[block]} tables" for block in wrong]
    if places[0]:
        found.append("the null block is held")
    return found


def _of_tree(holding: Holding) -> list[str]:
    tree = holding.cached
    children: dict[int, set[int]] = {}
    for block, cached in tree.blocks.items():
        children.setdefault(cached.parent, set()).add(block)
    # What is promised is computed by the end of the step, and continued by who ends in it.
    full = {
        block
        for held in holding.live.values()
        for block in held.blocks[: max(held.computed, held.promised) // holding.block_size]
    }
    found = ["the children of the cached blocks are not those that name them"] if children != tree.children else []
    known = full | tree.blocks.keys() | {0}
    found += [
        f"cached block {block} follows {each.parent}, which holds nothing"
        for block, each in tree.blocks.items()
        if each.parent not in known
    ]
    return found
