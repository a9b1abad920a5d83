"""The proof of the books: recomputes what is derived, from block tables and names alone, and says what differs.

Whole columns are compared first; only where two differ is it worth looking for the block that is to blame.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, pairwise, repeat

from kvmanager.blocks import BlockPool
from kvmanager.prefix_index import NO_BLOCK, NO_NAME
from kvmanager.sequence import Sequence
from kvmanager.types import NULL_BLOCK

Live = Mapping[str, Sequence]


def check_pool(blocks: BlockPool, live: Live, leased: list[int], table_entries: int, promised_pins: int) -> list[str]:
    """One sentence for each contradiction; none when the books are right. Changes nothing."""
    return [
        *_check_counts(blocks, live, leased, table_entries),
        *_check_states(blocks),
        *_check_sums(blocks),
        *_check_index(blocks),
        *_check_victims(blocks),
        *_check_pins(blocks, live, promised_pins),
        *_check_tenants(blocks, live),
        *_check_sequences(blocks, live),
        *_check_promises(blocks, live),
    ]


def _check_counts(blocks: BlockPool, live: Live, leased: list[int], table_entries: int) -> list[str]:
    entries = Counter(chain.from_iterable([sequence.blocks for sequence in live.values()]))
    wrong = [f"block {block} is in the lease and in a block table" for block in leased if block in entries]
    entries.update(leased)
    if (total := entries.total()) != table_entries:
        wrong.append(f"{total} block-table entries exist, but {table_entries} are counted")
    if NULL_BLOCK in entries:
        wrong.append(f"the null block {NULL_BLOCK} is in a block table")
    expected = [0] * len(blocks.counts)
    for block, count in entries.items():
        expected[block] = count
    if expected != blocks.counts:
        wrong += [_wrong_count(block, blocks, live, entries[block]) for block in _differing(expected, blocks.counts)]
    return wrong


def _wrong_count(block: int, blocks: BlockPool, live: Live, entries: int) -> str:
    holders = sorted([name for name, sequence in live.items() if block in sequence.blocks])
    count = blocks.counts[block]
    return f"block {block} has count {count}, but {entries} table entries name it (sequences {holders})"


def _check_states(blocks: BlockPool) -> list[str]:
    """Each block but the null block is free, cached (a count of 0 and a name) or held; and free ones hold nothing."""
    names, counts = blocks.index.names, blocks.counts
    is_free = [0] * len(counts)
    for block in blocks.free:
        is_free[block] += 1
    expected = [int(not (count or name)) for count, name in zip(counts, names, strict=True)]
    expected[NULL_BLOCK] = 0
    wrong: list[str] = []
    if is_free != expected:
        wrong += [
            f"block {block} is {is_free[block]} times free, its count is {counts[block]} and its name "
            f"{_shown(names[block])}: it must be in exactly one state"
            for block in _differing(is_free, expected)
        ]
    if names[NULL_BLOCK] or counts[NULL_BLOCK]:
        wrong.append(f"the null block {NULL_BLOCK} is held or named")
    return wrong + [
        f"block {block} stores {tokens} tokens, but is not held or has a name"
        for block, tokens in blocks.partial.items()
        if not counts[block] or names[block]
    ]


def _check_sums(blocks: BlockPool) -> list[str]:
    counts, names, totals = blocks.counts, blocks.index.names, blocks.totals
    held = [block for block, count in enumerate(counts) if count]
    # Blocks with a name, less those of them that are held.
    cached = len(names) - names.count(NO_NAME) - sum([1 for block in held if names[block]])
    facts = {
        "held": (blocks.held, len(held)),
        "cached": (blocks.cached, cached),
        "shared": (blocks.shared, sum([1 for block in held if counts[block] > 1])),
        "references": (blocks.references, sum(counts)),
        "stored tokens": (blocks.stored_tokens, sum(map(blocks.stored, held))),
        "allocated + reused - freed": (totals.allocated_blocks + totals.reused_blocks - totals.freed_blocks, len(held)),
        "free + cached + held": (len(blocks.free) + cached + len(held), blocks.usable),
    }
    return [
        f"{what} is kept as {kept}, but counting gives {recomputed}"
        for what, (kept, recomputed) in facts.items()
        if kept != recomputed
    ]


def _check_index(blocks: BlockPool) -> list[str]:
    """Each name is that of its owner and its spares, and each of them is in one place."""
    index, names = blocks.index, blocks.index.names
    broken = index.broken_branches()
    wrong = broken[:]
    owners = [block for branch in index.branches() for block in branch.blocks]
    own_names = {names[block] for block in owners}
    if len(own_names) < len(owners):
        wrong.append(f"{len(owners)} blocks are found, but under {len(own_names)} names")
    spares = list(index.spares())
    spare_blocks = {block for _, block in spares}
    for name, block in spares:
        if names[block] != name or index.owner(block) in spare_blocks:
            wrong.append(f"block {block} is a spare under {_shown(name)} and should not be")
        if not blocks.counts[block] or not blocks.counts[index.owner(block)]:
            wrong.append(f"spare block {block} or its owner is held by nobody")
    named = len(names) - names.count(NO_NAME)
    if named != len(owners) + len(spares):
        findable = spare_blocks.union(owners)
        lost = [block for block, name in enumerate(names) if bool(name) != (block in findable)]
        wrong += [f"block {block} is named {_shown(names[block])}, but the index does not have it" for block in lost]
    return wrong if broken else [*wrong, *index.contradictions(), *_check_tree(blocks)]


def _check_tree(blocks: BlockPool) -> list[str]:
    """Who holds a block holds those before it; and children are counted where there is not one."""
    index, counts = blocks.index, blocks.counts
    branches = index.branches()
    grown = Counter([branch.before() for branch in branches])
    wrong: list[str] = []
    expected: dict[int, int] = {block: 1 + number for block, number in grown.items() if block != NO_BLOCK}
    for branch in branches:
        path = [branch.before(), *branch.blocks] if branch.stem else branch.blocks
        held = [counts[block] for block in path]
        if 0 in held and any(held[held.index(0) :]):
            wrong += [
                f"block {block} is held, but the one before it is not"
                for (_, before), (block, count) in pairwise(zip(path, held, strict=True))
                if count and not before
            ]
        end = branch.blocks[-1]
        expected[end] = expected.get(end, 1) - 1
    not_one = {block: number for block, number in expected.items() if number != 1}
    if not_one != index.children():
        wrong += [
            f"block {block} has {number} children in the index, but {index.num_children(block)} are counted"
            for branch in branches
            for block, number in zip(branch.blocks, map(expected.get, branch.blocks, repeat(1)), strict=True)
            if number != index.num_children(block)
        ]
        strays = [block for block in index.children() if not index.names[block]]
        wrong += [f"the children of block {block} are counted, but it is not found" for block in strays]
    return wrong


def _check_victims(blocks: BlockPool) -> list[str]:
    """Victims are exactly the cached blocks without children and pins, each tenant's own as well.

    Those with a priority are kept apart from the policy's order.
    """
    counts, children, pinned = blocks.counts, blocks.index.children(), blocks.pins.until
    leaves = {block for block, number in children.items() if not number and not counts[block]}
    leaves.difference_update(pinned)
    kept = blocks.kept.members()
    offered = blocks.policy.offered()
    victims = {*offered, *kept}
    wrong = [
        f"block {block} may be given up {'' if block in leaves else 'as the order of victims says '}"
        f"but is {'not offered' if block in leaves else 'held, pinned, or continued by others'}"
        for block in leaves ^ victims
    ]
    twice = len(kept) + len(offered) - len(victims)
    if twice or set(kept) != {block for block in leaves if block in blocks.priorities}:
        wrong.append("the victims with a priority are not those that are kept apart")
    for tenant in blocks.tenants.everyone():
        if tenant.victims is not None:
            own = {block for block in leaves if blocks.tenants.owner(block) is tenant}
            if own != set(tenant.victims.members()):
                wrong.append(f"a tenant of {tenant.used} blocks has other victims than its leaves")
    return wrong


def _check_pins(blocks: BlockPool, live: Live, promised_pins: int) -> list[str]:
    """Marks are on findable blocks and pins on whole chains; and pinned blocks that are cached are counted."""
    counts, index, pinned = blocks.counts, blocks.index, blocks.pins.until
    idle = [block for block in pinned if not counts[block]]
    wrong: list[str] = []
    if len(idle) != blocks.pins.idle:
        wrong.append(f"{len(idle)} pinned blocks are cached, but {blocks.pins.idle} are counted")
    marked = [*pinned, *blocks.priorities]
    strangers = [block for block in marked if not index.names[block] or index.owner(block) != block]
    wrong += [f"block {block} is pinned or has a priority, but nobody can find it" for block in strangers]
    for branch in index.branches() if pinned and not index.broken_branches() else []:
        path = [branch.before(), *branch.blocks] if branch.stem else branch.blocks
        pins = [block in pinned for block in path]
        wrong += [
            f"block {block} is pinned, but the one before it is not"
            for (_, before), (block, pin) in pairwise(zip(path, pins, strict=True))
            if pin and not before
        ]
    by_tenant = Counter([blocks.tenants.owner(block) for block in idle])
    wrong += [
        f"a tenant has {by_tenant[tenant]} pinned blocks that are cached, but {tenant.pinned} are counted"
        for tenant in blocks.tenants.everyone()
        if by_tenant[tenant] != tenant.pinned
    ]
    promised = sum([sequence.pinned_blocks for sequence in live.values()])
    if promised != promised_pins:
        wrong.append(f"sequences will pin {promised} blocks, but {promised_pins} are counted")
    return wrong


def _check_tenants(blocks: BlockPool, live: Live) -> list[str]:
    """What each tenant occupies, and that nobody holds the block of another's."""
    counts, tenants = blocks.counts, blocks.tenants
    salted = tenants.of_block
    used = Counter(salted.values())
    cached = Counter([tenant for block, tenant in salted.items() if not counts[block]])
    used[tenants.base] = blocks.usable - len(blocks.free) - len(salted)
    cached[tenants.base] = blocks.cached - cached.total()
    wrong = [
        f"a tenant occupies {used[tenant]} blocks, {cached[tenant]} of them cached, but {tenant.used} and "
        f"{tenant.cached} are counted"
        for tenant in tenants.everyone()
        if (tenant.used, tenant.cached) != (used[tenant], cached[tenant])
    ]
    if not salted:
        return wrong
    return wrong + [
        f"sequence {sequence_id!r} holds block {block} of another tenant"
        for sequence_id, sequence in live.items()
        for block in sequence.blocks
        if tenants.owner(block) is not sequence.tenant
    ]


def _check_sequences(blocks: BlockPool, live: Live) -> list[str]:
    size, names = blocks.block_size, blocks.index.names
    wrong: list[str] = []
    for sequence_id, sequence in live.items():
        room = len(sequence.blocks) * size
        if not sequence.cached <= sequence.computed <= min(sequence.num_tokens, room):
            wrong.append(
                f"sequence {sequence_id!r} has {sequence.cached} cached and {sequence.computed} computed of "
                f"{sequence.num_tokens} tokens, and blocks for {room}"
            )
        full = min(sequence.computed // size, sequence.publishable)
        sequence.chain.compute(full)
        if [names[block] for block in sequence.blocks[:full]] != sequence.chain.names[:full]:
            wrong.append(f"a full block of sequence {sequence_id!r} is not published under its hash")
        wrong += [
            f"block {sequence.blocks[index]} of sequence {sequence_id!r} stores less than what is computed"
            for index in range(full, min(len(sequence.blocks), -(-sequence.computed // size)))
            if blocks.stored(sequence.blocks[index]) < min(size, sequence.computed - index * size)
        ]
    return wrong


def _check_promises(blocks: BlockPool, live: Live) -> list[str]:
    """The promised blocks are what sequences will compute next: held, and found under their hash."""
    size = blocks.block_size
    promised: set[int] = set()
    wrong: list[str] = []
    for sequence_id, sequence in live.items():
        first, last = sequence.computed // size, sequence.promised_blocks
        if first >= last:
            continue
        sequence.chain.compute(last)
        own = sequence.blocks[first:last]
        promised.update(own)
        if not all(
            blocks.index.names[block] == name and blocks.index.owner(block) == block
            for block, name in zip(own, sequence.chain.names[first:last], strict=True)
        ):
            wrong.append(f"a block that sequence {sequence_id!r} has promised is not found under its hash")
    if promised != blocks.promised:
        wrong.append(f"{len(promised)} blocks are promised, but {len(blocks.promised)} are counted, or others")
    return wrong


def _differing(one: Iterable[int], other: Iterable[int]) -> list[int]:
    return [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def _shown(name: bytes) -> str:
    return name.hex()[:16] or "none"
