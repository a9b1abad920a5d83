"""A model of a pool that is too simple to be wrong: a list of tokens for each sequence, and for each block its holders.

It knows no hashes, no queues and no sums. What is cached it derives from the history of commits, so it can say which
prefix a prompt may hit, but not which blocks were evicted: the machine compares those through their consequences.
"""

from __future__ import annotations


class NaiveBooks:
    def __init__(self, usable: int, size: int) -> None:
        self.usable = usable
        self.size = size
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.tables: dict[str, list[int]] = {}
        self.salts: dict[str, str] = {}
        self.contents: dict[int, tuple[int, ...]] = {}
        """What the physical block holds: written by commits and copies, as a runner would."""

    def blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.size - 1) // self.size

    def held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def count(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables.values())

    def write(self, sequence_id: str, first: int, last: int) -> None:
        """The runner computes positions first..last-1: the K/V of a position is named by all tokens up to it."""
        for position in range(first, last):
            block = self.tables[sequence_id][position // self.size]
            slot = position % self.size
            held = list(self.contents.get(block, ()))[:slot]
            held += [0] * (slot - len(held))
            self.contents[block] = (*held, self.content(sequence_id, position))

    def content(self, sequence_id: str, position: int) -> int:
        return hash((self.salts[sequence_id], tuple(self.tokens[sequence_id][: position + 1])))

    def holds_its_data(self, sequence_id: str) -> bool:
        """Whether each computed position of the sequence is where its block table says."""
        table = self.tables[sequence_id]
        for position in range(self.computed[sequence_id]):
            held = self.contents.get(table[position // self.size], ())
            slot = position % self.size
            if len(held) <= slot or held[slot] != self.content(sequence_id, position):
                return False
        return True
