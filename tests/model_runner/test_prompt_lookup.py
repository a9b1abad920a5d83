"""Prompt lookup against a search of the whole list, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from model_runner.prompt_lookup import PromptLookup


def naive_draft(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """The same by trying every length, longest first, at every place, latest first."""
    for length in range(min(longest, len(tokens)), 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                period = len(tokens) - place
                return [tokens[place + index % period] for index in range(count)]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(2, 5),
    count=st.integers(1, 12),
    steps=st.integers(1, 5),
)
def test_it_finds_what_a_search_finds(tokens: list[int], longest: int, count: int, steps: int) -> None:
    """Whether the list comes at once or in pieces."""
    lookup = PromptLookup(longest)
    for end in range(steps, len(tokens), steps):
        assert list(lookup.draft(tokens[:end], count)) == naive_draft(tokens[:end], longest, count)
    assert list(lookup.draft(tokens, count)) == naive_draft(tokens, longest, count)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], ()),
        ([7], ()),
        ([1, 2, 3], ()),
        # One token alone is not looked up.
        ([5, 6, 5], ()),
        # The end of the list is no occurrence of itself; of two earlier ones the later counts.
        ([1, 2, 8, 1, 2, 9, 1, 2], (9, 1, 2)),
        # Three tokens decide, though the last two alone have followed something later.
        ([1, 2, 3, 7, 7, 2, 3, 8, 1, 2, 3], (7, 7, 2)),
        ([5, 5, 5], (5, 5, 5)),
        ([1, 2, 3, 1, 2, 3], (1, 2, 3)),
        # The largest token id is no neighbour's.
        ([0, 2**32 - 1, 4, 1, 2**32 - 1, 0, 2**32 - 1], (4, 1, 2**32 - 1)),
    ],
)
def test_cases(tokens: list[int], expected: tuple[int, ...]) -> None:
    assert PromptLookup(3).draft(tokens, 3) == expected


def test_a_leading_zero_is_a_token_like_any_other() -> None:
    """The 5 6 that begins the list is the same number as 0 5 6, and not the same n-gram: the later 5 6 decides."""
    assert PromptLookup(3).draft([5, 6, 1, 5, 6, 2, 0, 5, 6], 1) == (2,)


def test_a_token_is_read_once() -> None:
    """However often the list grows, no token is taken in again."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            if isinstance(place, int):
                Counted.reads += 1
            return super().__getitem__(place)

    tokens = Counted()
    lookup = PromptLookup(3)
    for place in range(200):
        tokens.append(place % 17)
        lookup.draft(tokens, 4)
    assert Counted.reads == 200
