"""Books made anew from what a runner holds: the same counts and block tables, and the same hits.

All is checked before anything changes: first each part by itself, then whether those that share a block agree on what
it holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from kvmanager.errors import InvalidArgument
from kvmanager.hashing import HashChain
from kvmanager.holdings import HeldCache, HeldSequence, Holdings, check_holdings
from kvmanager.pool import Pool
from kvmanager.prefix_index import NO_BLOCK, NO_NAME
from kvmanager.sequence import Sequence
from kvmanager.types import CacheScope

Place = tuple[HashChain, int]
"""A chain, and the index of a block in it."""


@dataclass(slots=True)
class _Content:
    """What a block holds: its place in a chain, how many of the tokens there are computed, and whether it can be
    continued, for all of them are computed or promised."""

    chain: HashChain
    index: int
    filled: int
    full: bool = False


@dataclass(slots=True)
class _Run:
    """Cached blocks that follow each other, from index `first` of their chain on."""

    chain: HashChain
    first: int
    blocks: list[int]


class RestorablePool(Pool):
    """A pool whose books can be made from holdings while they are empty."""

    def restore(self, holdings: Holdings, *, caller: int) -> None:
        """Makes the books of an empty pool say what a runner holds; `caller` is the epoch that it speaks for.

        Counts, block tables and the lease are taken as they are said; full blocks are found again by their names, and
        given up in the order of use. What was said to be cached and can't be found, for it is a copy of what others
        hold, is noted as forgotten. Quotas, pins of ended sequences and totals are those of a new pool. Raises
        InvalidArgument for holdings that contradict themselves, and changes nothing.
        """
        check_holdings(self.spec, holdings)
        chains = [self._chain(each.token_ids, each.scope, ()) for each in holdings.sequences]
        contents = self._contents(holdings.sequences, chains)
        runs = self._runs(holdings.cached, contents)

        cached = [block for run in runs for block in run.blocks if block not in contents]
        self._put_on_top([*_tabled(holdings.sequences), *holdings.lease, *cached])
        for each, chain in zip(holdings.sequences, chains, strict=True):
            self._restore_sequence(each, chain, caller)
        self.block_pool.take(len(holdings.lease), self.block_pool.tenants.base)
        self.lease.add(holdings.lease)
        self.table_entries += len(holdings.lease)
        self._restore_cache(holdings.cached, runs, contents)

    # Checks: what several say of one block.

    def _contents(self, sequences: Seq[HeldSequence], chains: list[HashChain]) -> dict[int, _Content]:
        """What each block of the tables holds, by the sequence that has computed or promised most in it."""
        size = self.spec.block_size
        contents: dict[int, _Content] = {}
        for sequence, chain in zip(sequences, chains, strict=True):
            certain = (sequence.computed_tokens + sequence.promised_tokens) // size
            chain.compute(certain)
            for index, block in enumerate(sequence.block_ids):
                filled = min(size, max(0, sequence.computed_tokens - index * size))
                content = _Content(chain, index, filled, full=index < certain)
                known = contents.get(block)
                if known is not None:
                    self._check_agree(block, known, content)
                if known is None or (known.filled, known.full) < (filled, content.full):
                    contents[block] = content
        return contents

    def _check_agree(self, block: int, one: _Content, other: _Content) -> None:
        common = min(one.filled, other.filled)
        if one.index == other.index and one.chain.scope == other.chain.scope:
            if not common:
                return
            start = one.index * self.spec.block_size
            same = one.chain.token_ids[start : start + common] == other.chain.token_ids[start : start + common]
            if same and _name_before(one.chain, one.index) == _name_before(other.chain, other.index):
                return
        raise InvalidArgument(f"block {block} is said to hold two different things", block=block)

    def _runs(self, cached: Seq[HeldCache], contents: dict[int, _Content]) -> list[_Run]:
        """The cached blocks as runs with their names; a parent is another cached block, or a full one of a table."""
        places: dict[int, Place] = {
            block: (content.chain, content.index) for block, content in contents.items() if content.full
        }
        runs: list[_Run] = []
        for part in cached:
            if self.caches:
                self._add_runs(part, contents, places, runs)
        return runs

    def _add_runs(
        self, part: HeldCache, contents: dict[int, _Content], places: dict[int, Place], runs: list[_Run]
    ) -> None:
        size = self.spec.block_size
        last = NO_BLOCK
        for number, (block, parent) in enumerate(zip(part.block_ids, part.parents, strict=True)):
            tokens = part.token_ids[number * size : (number + 1) * size]
            if last and parent == last:
                run = runs[-1]
                run.chain.token_ids.extend(tokens)
            else:
                chain, first = self._branch(block, parent, part.scope, tokens, places)
                run = _Run(chain, first, [])
                runs.append(run)
            index = run.first + len(run.blocks)
            run.chain.compute(index + 1)
            run.blocks.append(block)
            if block in contents:
                self._check_agree(block, contents[block], _Content(run.chain, index, size))
            places[block] = (run.chain, index)
            last = block

    def _branch(
        self, block: int, parent: int, scope: CacheScope, tokens: array[int], places: dict[int, Place]
    ) -> Place:
        """A chain of its own for a block and what follows it, and the block's index in it."""
        if parent == NO_BLOCK:
            return self._chain(tokens, scope, ()), 0
        place = places.get(parent)
        if place is None or place[0].scope != scope:
            raise InvalidArgument(
                f"block {block} is said to follow block {parent}, which is no full block of its scope told before",
                block=block,
                parent=parent,
            )
        above, first = place[0], place[1] + 1
        chain = self._chain(above.token_ids[: first * self.spec.block_size] + tokens, scope, ())
        above.compute(first)
        chain.adopt(above.names[:first])
        return chain, first

    def _pins_of(self, sequence: HeldSequence) -> int:
        """Blocks that a sequence will pin: those of its prompt, as long as half of the pool is enough for all."""
        if not sequence.retention.pin_seconds:
            return 0
        return min(sequence.prompt_tokens // self.spec.block_size, self.spec.usable_blocks // 2 - self.promised_pins)

    # Changes: none of these can fail.

    def _put_on_top(self, order: list[int]) -> None:
        """Lets take() give out exactly these blocks next, in this order."""
        wanted = set(order)
        self.block_pool.free = [block for block in self.block_pool.free if block not in wanted] + order[::-1]

    def _restore_sequence(self, held: HeldSequence, chain: HashChain, caller: int) -> None:
        pool = self.block_pool
        tenant = pool.tenants.tenant(held.scope.salt)
        shared = [block for block in held.block_ids if pool.counts[block]]
        pool.take(len(held.block_ids) - len(shared), tenant)
        pool.share(shared)
        blocks = list(held.block_ids)
        publishable = held.cached_tokens // self.spec.block_size if held.skips_cache_write else self._publishable
        sequence = Sequence(held.sequence_id, caller, chain, blocks, 0, tenant, held.retention, publishable)
        sequence.skips_cache_write = held.skips_cache_write
        sequence.pinned_blocks = self._pins_of(held)
        self.promised_pins += sequence.pinned_blocks
        self.live[held.sequence_id] = sequence
        self.table_entries += len(blocks)
        self._commit(sequence, array("I"), held.computed_tokens)
        sequence.cached = held.cached_tokens
        self._promise(sequence, held.promised_tokens)

    def _restore_cache(self, cached: Seq[HeldCache], runs: list[_Run], contents: dict[int, _Content]) -> None:
        """Publishes the runs, then lets go of their blocks in the order in which they were used."""
        pool = self.block_pool
        idle: list[int] = []
        for run in runs:
            fresh = [block for block in run.blocks if block not in contents]
            pool.take(len(fresh), pool.tenants.tenant(run.chain.scope.salt))
            idle += fresh
            last = run.first + len(run.blocks)
            path = pool.index.match(run.chain, run.first)
            if len(path) == run.first:
                pool.publish(path + run.blocks, run.chain, run.first, last)
        for blocks in _by_use(cached, idle):
            pool.release(blocks)
        pool.note_forgotten([block for part in cached for block in part.block_ids if not pool.index.names[block]])


def _tabled(sequences: Seq[HeldSequence]) -> list[int]:
    """The blocks of the tables, each once, in the order in which they are first named."""
    return list(dict.fromkeys([block for sequence in sequences for block in sequence.block_ids]))


def _name_before(chain: HashChain, index: int) -> bytes:
    return chain.name(index - 1) if index else NO_NAME


def _by_use(cached: Seq[HeldCache], idle: list[int]) -> list[list[int]]:
    """`idle` by time of use, the earliest first, each time's with the last of a chain first.

    A block was used when the last that continues it was.
    """
    order = [pair for part in cached for pair in zip(part.block_ids, part.parents, strict=True)]
    used = {block: time for time, (block, _) in enumerate(order)}
    place = dict(used)
    for block, parent in reversed(order):
        if parent in used:
            used[parent] = max(used[parent], used[block])
    by_time: dict[int, list[int]] = {}
    for block in sorted(idle, key=place.__getitem__, reverse=True):
        by_time.setdefault(used[block], []).append(block)
    return [by_time[time] for time in sorted(by_time)]
