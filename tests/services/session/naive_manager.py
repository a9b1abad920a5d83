"""A KV manager that is lists and dictionaries: it reads step messages by the contract, and hits what equals a prompt.

It keeps the whole prefix that each full block holds, so that nothing has to be hashed, followed or derived.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from octavo.kv.v1 import kv_manager_pb2 as pb

from services.columns import from_column, to_column


def ids(column: bytes) -> list[int]:
    return from_column(column, "column").tolist()


def _continues(prefix: tuple[int, ...], start: tuple[int, ...]) -> bool:
    return len(prefix) > len(start) and prefix[: len(start)] == start


Grants = list[tuple[int, int, list[int]]]
"""Handle, first index, and blocks of each."""


@dataclass
class NaiveSequence:
    name: str
    tokens: list[int]
    blocks: list[int]
    computed: int
    findable: int = 1 << 62
    """Tokens, from the first, that can be hit once they are computed."""


@dataclass
class NaiveManager:
    """`contents`: by block, the prefix that ends with it, for full blocks that can be hit."""

    num_blocks: int
    size: int
    wanted: int
    rng: random.Random
    live: dict[int, NaiveSequence] = field(default_factory=dict)
    lease: list[int] = field(default_factory=list)
    contents: dict[int, tuple[int, ...]] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)

    def held(self) -> list[int]:
        return [block for each in self.live.values() for block in each.blocks]

    def idle(self) -> set[int]:
        """Blocks that can be hit and that nobody holds."""
        return self.contents.keys() - set(self.held())

    def take(self) -> int | None:
        """A free block; or else a cached one that no other continues."""
        used = {0, *self.held(), *self.lease, *self.contents}
        free = [block for block in range(self.num_blocks) if block not in used]
        if free:
            return self.rng.choice(free)
        prefixes = list(self.contents.values())
        leaves = [
            block
            for block in sorted(self.idle())
            if not any(_continues(prefix, self.contents[block]) for prefix in prefixes)
        ]
        if not leaves:
            return None
        block = self.rng.choice(leaves)
        del self.contents[block]
        self.forgotten.append(block)
        return block

    def fill_lease(self) -> bytes:
        new = []
        while len(self.lease) < self.wanted and (block := self.take()) is not None:
            self.lease.append(block)
            new.append(block)
        return to_column(new)

    def restore(self, parts: list[pb.Holdings]) -> None:
        """Becomes what is reported; a block that is told twice, or a parent that is not told before, is a fault."""
        for part in parts:
            self.lease += ids(part.lease_block_ids)
            for each in part.sequences:
                tokens = ids(each.token_ids)
                self.live[each.handle] = NaiveSequence(
                    each.sequence_id, tokens, ids(each.block_ids), each.computed_tokens
                )
                if each.skip_cache_write:
                    self.live[each.handle].findable = each.cached_tokens
                self._publish(self.live[each.handle])
        for part in parts:
            for run in part.cached:
                tokens = ids(run.token_ids)
                for index, (block, parent) in enumerate(
                    zip(ids(run.block_ids), ids(run.parent_block_ids), strict=True)
                ):
                    assert block not in self.contents, "told twice"
                    before = self.contents[parent] if parent else ()
                    self.contents[block] = (*before, *tokens[index * self.size : (index + 1) * self.size])

    def carry_out(self, step: pb.SessionStep) -> pb.SessionAnswer:
        answer = pb.SessionAnswer(number=step.number)
        for block in ids(step.returned_block_ids):
            self.lease.remove(block)
        grants: Grants = []
        for order in step.orders:
            match order.WhichOneof("order"):
                case "progress":
                    self._progress(order.progress, grants, answer)
                case "end":
                    self._progress(order.end.progress, grants, answer)
                    for handle in ids(order.end.progress.handles):
                        self.live.pop(handle, None)
                case "fork":
                    parent = self.live[order.fork.parent_handle]
                    for name, handle in zip(order.fork.child_ids, ids(order.fork.child_handles), strict=True):
                        self.live[handle] = NaiveSequence(
                            name, parent.tokens[:], parent.blocks[:], parent.computed, parent.findable
                        )
                case "truncate":
                    self._truncate(self.live[order.truncate.handle], order.truncate.num_tokens)
                case "admit":
                    self._admit(order.admit, answer)
        answer.grants.handles = to_column(handle for handle, _, _ in grants)
        answer.grants.first_indices = to_column(first for _, first, _ in grants)
        answer.grants.counts = to_column(len(blocks) for _, _, blocks in grants)
        answer.grants.block_ids = to_column(block for _, _, blocks in grants for block in blocks)
        if not answer.refusals:
            answer.lease_block_ids = self.fill_lease()
        answer.forgotten_block_ids = to_column(self.forgotten)
        self.forgotten = []
        return answer

    def _progress(self, told: pb.Progress, grants: Grants, answer: pb.SessionAnswer) -> None:
        tokens, taken = ids(told.token_ids), ids(told.taken_block_ids)
        columns = (
            told.handles,
            told.token_counts,
            told.computed_tokens,
            told.taken_counts,
            told.asks,
            told.table_counts,
        )
        for handle, num_tokens, computed, num_taken, asks, entries in zip(*map(ids, columns), strict=True):
            each = self.live.get(handle)
            if each is None:
                continue
            each.tokens += tokens[:num_tokens]
            if num_taken:
                each.blocks[entries:] = taken[:num_taken]
                for block in taken[:num_taken]:
                    self.lease.remove(block)
            del tokens[:num_tokens], taken[:num_taken]
            each.computed = computed or each.computed
            assert each.computed <= min(len(each.tokens), len(each.blocks) * self.size)
            self._publish(each)
            if asks:
                self._grow(handle, each, asks - 1, grants, answer)
        assert not tokens
        assert not taken

    def _grow(self, handle: int, each: NaiveSequence, ahead: int, grants: Grants, answer: pb.SessionAnswer) -> None:
        table = each.blocks[:]
        first = each.computed // self.size
        shared = [index for index in range(first, len(table)) if self.held().count(table[index]) > 1]
        start = min([len(table), *shared])
        missing = max(0, -(-(len(each.tokens) + ahead) // self.size) - len(table))
        fresh: list[int] = []
        for _ in range(len(shared) + missing):
            block = self.take()
            if block is None:
                each.blocks = table
                answer.refusals.append(pb.Refusal(handle=handle, reason="POOL_SHORT", sentence="full"))
                return
            fresh.append(block)
            # So that it is not taken again.
            each.blocks.append(block)
        for index in shared:
            source, target = table[index], fresh.pop(0)
            filled = each.computed - index * self.size
            if filled > 0:
                copy = pb.BlockCopy(source_block_id=source, target_block_id=target, num_tokens=filled)
                answer.grants.copies.append(copy)
            table[index] = target
        each.blocks = table + fresh
        if each.blocks[start:]:
            grants.append((handle, start, each.blocks[start:]))

    def _truncate(self, each: NaiveSequence, num_tokens: int) -> None:
        assert each.computed <= num_tokens <= len(each.tokens)
        del each.tokens[num_tokens:]
        del each.blocks[-(-num_tokens // self.size) :]

    def _admit(self, order: pb.AdmitOrder, answer: pb.SessionAnswer) -> None:
        tokens = ids(order.token_ids)
        blocks: list[int] = []
        by_prefix = {prefix: block for block, prefix in self.contents.items()}
        while (len(blocks) + 1) * self.size < len(tokens):
            hit = by_prefix.get(tuple(tokens[: (len(blocks) + 1) * self.size]))
            if hit is None:
                break
            blocks.append(hit)
        cached = len(blocks) * self.size
        each = self.live[order.handle] = NaiveSequence(order.sequence_id, tokens, blocks, cached)
        if order.skip_cache_write:
            each.findable = cached
        while len(blocks) * self.size < len(tokens):
            block = self.take()
            if block is None:
                del self.live[order.handle]
                answer.refusals.append(pb.Refusal(handle=order.handle, reason="POOL_SHORT", sentence="full"))
                return
            each.blocks.append(block)
        answer.admitted.append(pb.Admitted(handle=order.handle, block_ids=to_column(blocks), cached_tokens=cached))

    def _publish(self, each: NaiveSequence) -> None:
        for index in range(min(each.computed, each.findable) // self.size):
            self.contents[each.blocks[index]] = tuple(each.tokens[: (index + 1) * self.size])
