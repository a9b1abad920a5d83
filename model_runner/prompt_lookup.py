"""Guesses how a sequence goes on: what followed its last tokens where they stood before may follow them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

SHORTEST = 2
"""Tokens of the shortest n-gram that is looked up: one token alone stands before too many others."""
_TOKEN_BITS = 32


class PromptLookup:
    """An index of one growing list of tokens: from each n-gram to what followed its latest occurrence.

    add() costs the same for each token, and draft() nothing that grows with the list. An entry takes about 110 bytes,
    and each token makes `longest` - 1 of them at most.
    """

    __slots__ = ("_followers", "_indexed", "_masks", "_window")

    def __init__(self, longest: int) -> None:
        """longest: tokens of the longest n-gram that is looked up, SHORTEST or more."""
        # An n-gram is the number that its token ids make side by side, so that no two are taken for one another.
        self._masks = [(1 << _TOKEN_BITS * length) - 1 for length in range(SHORTEST, longest + 1)]
        self._followers: list[dict[int, int]] = [{} for _ in self._masks]
        self._window = 0
        self._indexed = 0

    def add(self, token_ids: Sequence[int]) -> None:
        """Takes in what has been appended; `token_ids` is the whole list, each id from 0 to 2^32 - 1."""
        window, widest = self._window, self._masks[-1]
        for place in range(self._indexed, len(token_ids)):
            # What ends before this token is followed by it; what ends with it is not followed by anything yet.
            for index in range(self._lengths(place)):
                self._followers[index][window & self._masks[index]] = place
            window = (window << _TOKEN_BITS | token_ids[place]) & widest
        self._window, self._indexed = window, len(token_ids)

    def draft(self, token_ids: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that may follow, or none.

        They are what followed the latest earlier occurrence of the longest n-gram that ends the list and has one. Where
        that reaches the end of the list, it begins again: the list repeats itself.
        """
        self.add(token_ids)
        for index in range(self._lengths(len(token_ids)) - 1, -1, -1):
            place = self._followers[index].get(self._window & self._masks[index])
            if place is not None:
                return tuple(islice(cycle(token_ids[place : place + count]), count))
        return ()

    def _lengths(self, num_tokens: int) -> int:
        """Of how many lengths there is an n-gram in so many tokens."""
        return min(len(self._masks), max(0, num_tokens - SHORTEST + 1))
