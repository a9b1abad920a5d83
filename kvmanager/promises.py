"""Promises: blocks that can be found although they are not computed yet, because the next step is certain to do it.

Who allocates a prompt may promise to compute so many of its tokens in its next step. The full blocks among them are
published at once, so that an equal prompt of the same step shares them. The next word about the sequence settles it: an
Append that commits all of them, or a Free. What a Free leaves uncomputed is withdrawn with all that continues it, and
whoever had hit it has computed nothing from there on, and publishes nothing from there on.

Until then nothing but Allocate may follow, because copies are made before a step and read what is computed.
"""

from __future__ import annotations

from kvmanager.requests import Requests
from kvmanager.sequence import Sequence


class Promises(Requests):
    """Keeps `promised_blocks` of each sequence and the pool's set of promised blocks."""

    def _promise(self, sequence: Sequence, num_tokens: int) -> None:
        """Publishes the full blocks within the next `num_tokens` tokens, up to the first that has a name already."""
        size = self.spec.block_size
        first = sequence.computed // size
        last = min((sequence.computed + num_tokens) // size, sequence.num_tokens // size, sequence.publishable)
        if first >= last:
            return
        sequence.chain.compute(last)
        last = self.block_pool.index.end_of_new(sequence.blocks, sequence.chain, first, last)
        if first < last:
            self.block_pool.publish(sequence.blocks, sequence.chain, first, last)
            self.block_pool.promised.update(sequence.blocks[first:last])
            sequence.promised_blocks = last

    def _keep(self, sequence: Sequence) -> None:
        """What is computed now is promised no more."""
        computed = sequence.computed // self.spec.block_size
        self.block_pool.promised.difference_update(sequence.blocks[: min(computed, sequence.promised_blocks)])
        if computed >= sequence.promised_blocks:
            sequence.promised_blocks = 0

    def _withdraw(self, sequence: Sequence) -> None:
        """Takes the names of what a sequence promised and did not compute; O(table entries of all that live)."""
        first = sequence.computed // self.spec.block_size
        if first >= sequence.promised_blocks:
            return
        root = sequence.blocks[first]
        equals: dict[bytes, list[int]] = {}
        for name, spare in self.block_pool.index.spares():
            equals.setdefault(name, []).append(spare)
        gone: set[int] = set()
        for owner in [*reversed(self._descendants(root)), root]:
            blocks = [*equals.get(self.block_pool.index.names[owner], ()), owner]
            for block in blocks:
                self._take_name(block)
            gone.update(blocks)
        self.block_pool.promised -= gone
        sequence.promised_blocks = 0
        for holder in self.live.values():
            self._taint(holder, gone)

    def _take_name(self, block: int) -> None:
        if self.block_pool.counts[block]:
            self.block_pool.unpublish(block, 0)
        else:
            self.block_pool.remove(block)

    def _taint(self, holder: Sequence, gone: set[int]) -> None:
        """Whoever holds a withdrawn block has computed what lies before it, and will publish no more than that."""
        lost = [index for index, block in enumerate(holder.blocks) if block in gone]
        if not lost:
            return
        index = lost[0]
        holder.publishable = min(holder.publishable, index)
        holder.promised_blocks = min(holder.promised_blocks, index)
        holder.computed = min(holder.computed, index * self.spec.block_size)
        holder.cached = min(holder.cached, holder.computed)

    def _descendants(self, block: int) -> list[int]:
        """The published blocks that continue a block, each before those that continue it."""
        index = self.block_pool.index
        tree = index.tree()
        found = [block]
        for each in found:
            found += tree.get(index.names[each], [])
        return found[1:]
