"""What a runner tells of its sequences in one message and what it asks for them, column by column."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import NamedTuple

from kvmanager.sequence import Sequence


class NewsRow(NamedTuple):
    """The news of one sequence."""

    sequence: Sequence
    told: int
    """How many tokens are new."""
    computed: int
    entries: int
    taken: array[int]


class News(NamedTuple):
    """Columns of one entry for each sequence, but for token_ids and taken, which their counts cut.

    token_ids: tokens that follow those told before. computed: how many of a sequence's tokens are computed now; 0: as
    before. taken: blocks of the lease that are the last of its table from now on, behind so many `entries` of it.
    asks: 0, or 1 and more for room for all of its tokens and one less than so many behind.
    """

    sequences: list[Sequence]
    token_counts: array[int]
    token_ids: array[int]
    computed: array[int]
    asks: array[int]
    entries: array[int]
    taken_counts: array[int]
    taken: array[int]

    def rows(self, places: list[int]) -> list[NewsRow]:
        """The news of the sequences at these places."""
        ends = list(accumulate(self.taken_counts)) if self.taken else []
        return [
            NewsRow(
                self.sequences[place],
                self.token_counts[place],
                self.computed[place] or self.sequences[place].computed,
                self.entries[place],
                self.taken[ends[place] - self.taken_counts[place] : ends[place]] if ends else self.taken,
            )
            for place in places
        ]

    def tell(self) -> None:
        """Adds the new tokens to those of their sequences."""
        token_ids, counts = self.token_ids, self.token_counts
        if not token_ids:
            return
        if len(token_ids) == len(counts) and counts.count(1) == len(counts):
            # The common case: a decode step.
            for sequence, token_id in zip(self.sequences, token_ids, strict=True):
                sequence.chain.token_ids.append(token_id)
            return
        end = 0
        for sequence, count in zip(self.sequences, counts, strict=True):
            if count:
                sequence.chain.token_ids.extend(token_ids[end : end + count])
                end += count
