"""Who gets a draft, and how long, step by step; answers are looked at in test_speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvmanager import KvManager
from model_runner.books import BlockGrant, CopyOrder, Growth, PoolFacts, SequenceUpdate
from model_runner.detokenizer import Detokenizer
from model_runner.drafting import Drafter
from model_runner.request import BeamSearch, GenerateRequest, StopConditions
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.sequence import LiveRequest
from model_runner.sequence import Sequence as LiveSequence
from model_runner.step_plan import StepPlan, Work
from services.books_inprocess import InProcessBooks
from tests.model_runner.toy_model import ToyTokenizer

SIZE = 4
COPY = CopyOrder(1, 2, 3)
HABIT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
"""What follows 1 2 is 3 4 5 and so on."""


class Books(InProcessBooks):
    """Books with a copy that is due, which they hand out with the first room."""

    def __init__(self) -> None:
        super().__init__(KvManager("boot"))
        self.open(PoolFacts(65, SIZE, 0, "toy"))
        self.extended: list[SequenceUpdate] = []

    def extend(self, updates: Sequence[SequenceUpdate]) -> Growth:
        self.extended += updates
        growth = super().extend(updates)
        return Growth([*growth.grants, BlockGrant("somebody else", 0, [], [COPY])], growth.stalled)


def decoding(
    books: Books, name: str, *, outputs: int = 1, max_tokens: int | None = None, **options: Any
) -> LiveSequence:
    """A sequence with HABIT as its tokens, all but the last computed, in 3 blocks."""
    prompt = HABIT[:-outputs] if outputs else HABIT
    request = GenerateRequest(name, tuple(prompt), stop=StopConditions(max_tokens), **options)
    live = LiveRequest(request, arrived_at=0.0, forked=outputs > 0)
    sequence = LiveSequence(live, 0, name, HABIT[:], 0, Detokenizer(ToyTokenizer(), ()), num_outputs=outputs)
    admission = books.allocate(sequence.allocation(0, 0))
    assert admission is not None
    sequence.start(admission.block_ids, 0, SIZE)
    sequence.computed = len(HABIT) - 1
    return sequence


def drafts(books: Books, sequences: Sequence[LiveSequence], *, budget: int = 100, longest: int = 200) -> list[int]:
    """How long each one's draft is when all of them decode; 6 tokens are guessed at most."""
    limits = SchedulerLimits(SIZE, max_batched_tokens=budget, speculative_tokens=6)
    plan = StepPlan(work=[Work(sequence, 1) for sequence in sequences])
    Drafter(books, limits, longest).draft(plan)
    return [len(sequence.draft) for sequence in sequences]


def test_a_draft_is_what_followed_before() -> None:
    books = Books()
    sequence = decoding(books, "a")
    assert drafts(books, [sequence]) == [6]
    assert sequence.draft == (3, 4, 5, 6, 7, 8)
    assert [update.token_ids for update in books.extended] == [[3, 4, 5, 6, 7, 8]]
    assert (sequence.told, len(sequence.block_table)) == (16, 4)
    entry = sequence.entry(1)
    assert (list(entry.token_ids), entry.first_position, entry.num_logits) == ([2, 3, 4, 5, 6, 7, 8], 9, 7)


@pytest.mark.parametrize(("budget", "expected"), [(3, [0, 0, 0]), (5, [2, 0, 0]), (11, [6, 2, 0]), (99, [6, 6, 6])])
def test_the_rest_of_the_budget_goes_to_the_oldest_first(budget: int, expected: list[int]) -> None:
    books = Books()
    assert drafts(books, [decoding(books, name) for name in "abc"], budget=budget) == expected


@pytest.mark.parametrize(("max_tokens", "expected"), [(2, 0), (3, 1), (7, 5), (9, 6), (None, 6)])
def test_no_more_is_guessed_than_may_still_come(max_tokens: int | None, expected: int) -> None:
    """With one output so far; the last token needs no guess."""
    books = Books()
    assert drafts(books, [decoding(books, "a", max_tokens=max_tokens)]) == [expected]


@pytest.mark.parametrize(("longest", "expected"), [(10, 0), (11, 1), (13, 3), (16, 6), (17, 6)])
def test_no_position_beyond_the_longest_sequence_is_computed(longest: int, expected: int) -> None:
    books = Books()
    assert drafts(books, [decoding(books, "a")], longest=longest) == [expected]


def test_a_draft_that_fits_is_not_told() -> None:
    """10 tokens in 3 blocks leave room for 2."""
    books = Books()
    sequence = decoding(books, "a", max_tokens=4)
    assert drafts(books, [sequence]) == [2]
    assert books.extended == []
    assert sequence.told == 10


def test_copies_that_are_due_are_not_lost() -> None:
    books = Books()
    sequence = decoding(books, "a")
    plan = StepPlan(work=[Work(sequence, 1)])
    Drafter(books, SchedulerLimits(SIZE, speculative_tokens=6), 200).draft(plan)
    assert plan.copies == [COPY]


def test_nothing_is_guessed_for_prompts_and_beams() -> None:
    books = Books()
    prompt = decoding(books, "a", outputs=0)
    beam = decoding(books, "b", beam_search=BeamSearch(2))
    assert drafts(books, [prompt, beam]) == [0, 0]
