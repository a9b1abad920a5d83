"""Blocks of a chain that share all that a policy knows of them, as one object: what happens to them is noted once."""

from __future__ import annotations

from typing import Final

from kvmanager.errors import BrokenBooks


class Run:
    """`blocks` follow each other in a chain from index `depth` on; none is in two runs. Owned by its policy.

    uses, turn, wait and kind are what AdaptiveEviction learns from. stamp: when the blocks were released, in stored
    blocks; release: which release that was, by number. born, idle_since: when they were computed, on average, and last
    let go, in seconds of the pool's clock. cached: nobody holds them. gone: how many blocks behind these were given
    up, which had the same past; gone_name: the last's name. group: the list of runs on offer that it is in, between
    `before` and `after`; NO_GROUP for none.
    """

    # fmt: off
    __slots__ = (
        "after", "before", "blocks", "born", "cached", "depth", "gone", "gone_name", "group", "idle_since", "kind",
        "release", "stamp", "turn", "uses", "wait",
    )
    # fmt: on

    def __init__(self, blocks: list[int], depth: int) -> None:
        self.blocks = blocks
        self.depth = depth
        self.uses = 1
        self.turn = 0
        self.wait = 0
        self.kind = 0
        self.stamp = 0
        self.release = 0
        self.born = 0.0
        self.idle_since = 0.0
        self.cached = False
        self.gone = 0
        self.gone_name = b""
        self.group = NO_GROUP
        self.before: Run | None = None
        self.after: Run | None = None

    def beginning(self, count: int) -> Run:
        """A run of the first `count` blocks that shares all but the offer and what is gone: both are at its end."""
        run = Run(self.blocks[:count], self.depth)
        run.uses, run.turn, run.wait, run.kind = self.uses, self.turn, self.wait, self.kind
        run.stamp, run.release, run.cached = self.stamp, self.release, self.cached
        run.born, run.idle_since = self.born, self.idle_since
        return run


NO_GROUP: Final = -1


class Runs:
    """The run of each block of a policy."""

    __slots__ = ("_runs",)

    def __init__(self, num_blocks: int) -> None:
        self._runs: list[Run] = [Run([], 0)] * num_blocks

    def of(self, block: int) -> Run:
        """The run of a block that has content."""
        return self._runs[block]

    def add(self, run: Run) -> None:
        """A run of blocks that are in no other one."""
        self._claim(run.blocks, run)

    def shorten(self, run: Run, count: int) -> None:
        """The last `count` blocks of a run have no content any more."""
        del run.blocks[len(run.blocks) - count :]

    def cover(self, blocks: list[int]) -> list[Run]:
        """The runs that `blocks`, a part of a chain, consist of; a run that goes on beyond is cut.

        Raises BrokenBooks for a block that has no content.
        """
        runs: list[Run] = []
        place = 0
        while place < len(blocks):
            run = self.of(blocks[place])
            if not run.blocks:
                raise BrokenBooks(f"block {blocks[place]} is used and has been given up", block=blocks[place])
            there = blocks[place : place + len(run.blocks)] if place or len(run.blocks) < len(blocks) else blocks
            if run.blocks != there:
                run = self._cut_out(run, there)
            runs.append(run)
            place += len(run.blocks)
        return runs

    def ending(self, block: int) -> Run:
        """The run whose last block is `block`; a longer one is cut behind it."""
        run = self.of(block)
        if run.blocks[-1] == block:
            return run
        return self._cut(run, run.blocks.index(block) + 1)

    def end(self, run: Run) -> Run:
        """Cuts the last block of a run that is not on offer off, as a run of its own; a run of one stays whole."""
        if len(run.blocks) == 1:
            return run
        last = run.beginning(0)
        last.blocks.append(run.blocks.pop())
        last.depth = run.depth + len(run.blocks)
        self.add(last)
        return last

    def join(self, runs: list[Run]) -> list[Run]:
        """Makes one of neighbours that have the same number of uses; none may be on offer, and all else must be equal.

        The shorter is added to the longer.
        """
        joined = runs[:1]
        for right in runs[1:]:
            left = joined[-1]
            if left.uses != right.uses or left.depth + len(left.blocks) != right.depth:
                joined.append(right)
                continue
            left.born = right.born = _mean_born(left, right)
            if len(left.blocks) < len(right.blocks):
                right.blocks[:0] = left.blocks
                right.depth = left.depth
                self._claim(left.blocks, right)
                joined[-1] = right
            else:
                left.blocks += right.blocks
                self._claim(right.blocks, left)
        return joined

    def drop(self, block: int) -> None:
        """`block`, which is not on offer, has no content any more."""
        self.shorten(self.ending(block), 1)

    def _cut_out(self, run: Run, blocks: list[int]) -> Run:
        """Cuts a run in front of the first of `blocks`, and behind those of them that it has."""
        start = run.blocks.index(blocks[0])
        if start:
            self._cut(run, start)
        count = 1
        while count < min(len(run.blocks), len(blocks)) and run.blocks[count] == blocks[count]:
            count += 1
        return self._cut(run, count) if count < len(run.blocks) else run

    def _cut(self, run: Run, count: int) -> Run:
        """Makes a run of its own of the first `count` blocks, and returns it; `run` keeps the others and the offer."""
        first = run.beginning(count)
        del run.blocks[:count]
        run.depth += count
        self.add(first)
        return first

    def _claim(self, blocks: list[int], run: Run) -> None:
        runs = self._runs
        for block in blocks:
            runs[block] = run


def _mean_born(left: Run, right: Run) -> float:
    """Of all blocks of both."""
    if left.born == right.born:
        return left.born
    blocks = len(left.blocks) + len(right.blocks)
    return (left.born * len(left.blocks) + right.born * len(right.blocks)) / blocks
