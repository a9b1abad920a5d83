"""A beam search played over the real books, with made-up rules for whose children survive.

After each step of a search some of its `width` sequences have several children among the next ones and some have none.
The former are forked, the latter freed, and every survivor appends its next token: a block that it shares and must
write into is copied. Parallel sampling is the search in which everybody has one child (`each_its_own`).

No model runs here, so token ids are numbers that never come twice, and the survivors are drawn by rules that are stated
below. How much a search saves hangs on that rule: the fewer steps ago all had one ancestor, the more they share.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from kvmanager import Pool
from kvmanager.types import Append

Survivors = Callable[[int], list[int]]
"""Given how many sequences live, the parent (an index of them) of each of the next ones."""

SurvivorRule = Callable[[int, Random], Survivors]
"""Makes the survivors of one search of the given width."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What one step did to the books, and what they hold after it.

    new_blocks, copies: blocks taken, and those of them that a shared block was copied into. recomputed_prompt_tokens:
    prompt tokens that a survivor would have to compute again. held_blocks: blocks in use. table_blocks: entries of all
    block tables, which is what the same sequences would use if they shared nothing.
    """

    new_blocks: int
    copies: int
    recomputed_prompt_tokens: int
    held_blocks: int
    table_blocks: int


class BeamSearch:
    """One search in `pool`, as wide as the parents that each step is given.

    It must have the pool to itself while it lives: what a step reports is the pool's.
    """

    def __init__(self, pool: Pool, search_id: str, prompt: Sequence[int], token_ids: Iterator[int]) -> None:
        """Allocates the prompt. `token_ids` yields every token that the search appends. Raises NeverFits, PoolShort."""
        self.pool = pool
        self.live = [f"{search_id}/0"]
        self.num_tokens = len(prompt)
        self._search_id = search_id
        self._prompt_tokens = len(prompt)
        self._token_ids = token_ids
        self._named = 1
        pool.allocate(self.live[0], prompt, skip_cache_read=True)

    def step(self, parents: Sequence[int]) -> BeamStep:
        """Replaces the live sequences by children of theirs, one token longer; parents[i] is the i-th child's parent.

        Raises PoolShort when the blocks don't suffice.
        """
        totals = self.pool.totals
        allocated, copies = totals.allocated_blocks, totals.copies
        children = {parent: self._branch(self.live[parent], count) for parent, count in Counter(parents).items()}
        # Losers go first: their blocks may be the ones that survivors need.
        self._free([loser for index, loser in enumerate(self.live) if index not in children])
        self.live = [children[parent].pop() for parent in parents]
        self.pool.append([Append(child, (next(self._token_ids),), self.num_tokens) for child in self.live])
        self.num_tokens += 1
        return BeamStep(
            totals.allocated_blocks - allocated,
            totals.copies - copies,
            sum(max(0, self._prompt_tokens - self.pool.sequence(child).computed) for child in self.live),
            self.pool.occupancy().held_blocks,
            self.pool.table_entries,
        )

    def end(self) -> None:
        """Frees all that lives."""
        self._free(self.live)
        self.live = []

    def _branch(self, parent: str, count: int) -> list[str]:
        """The parent, which lives on as its own first child, and count - 1 forks of it."""
        forks = [f"{self._search_id}/{self._named + index}" for index in range(count - 1)]
        self._named += len(forks)
        if forks:
            self.pool.fork(parent, forks)
        return [parent, *forks]

    def _free(self, sequence_ids: Sequence[str]) -> None:
        self.pool.free([Append(sequence_id, (), self.num_tokens) for sequence_id in sequence_ids])


# Who survives. Each rule starts from one sequence, the prompt, whose children all of the first survivors are.


def stays(chance: float) -> SurvivorRule:
    """Each survivor is its predecessor's child with this chance, else the child of any sequence alike."""

    def rule(width: int, rng: Random) -> Survivors:
        return lambda live: [
            index if index < live and rng.random() < chance else rng.randrange(live) for index in range(width)
        ]

    return rule


each_its_own = stays(1.0)
"""Everybody has one child: parallel sampling, and the least that a search can share."""

uniform = stays(0.0)
"""Each survivor is the child of any sequence alike, whoever the others' parents are."""


def ranked(width: int, rng: Random) -> Survivors:
    """Each survivor is a child of the best with twice the chance of the second, four times that of the third."""
    return lambda live: sorted(rng.choices(range(live), [0.5**rank for rank in range(live)], k=width))


def scored(width: int, rng: Random) -> Survivors:
    """A beam search over the scores of a made-up model: the `width` most probable of all continuations survive.

    The model's next token takes a uniform share of all probability, the one after it a uniform share of what is left,
    and so on, afresh for each sequence and step (stick-breaking with concentration 1).
    """
    scores = [1.0]

    def survivors(live: int) -> list[int]:
        nonlocal scores
        offers = [(score * share, parent) for parent, score in enumerate(scores) for share in _shares(width, rng)]
        best = heapq.nlargest(width, offers)
        # Relative to the best one, or a long search would underflow.
        scores = [score / best[0][0] for score, _ in best]
        return [parent for _, parent in best]

    return survivors


def _shares(count: int, rng: Random) -> Iterator[float]:
    """The probabilities of `count` next tokens."""
    left = 1.0
    for _ in range(count):
        kept = rng.random()
        yield left * (1.0 - kept)
        left *= kept
