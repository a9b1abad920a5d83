"""Beam search by the rules of Hugging Face transformers 5: which beams go on, which answers have finished, and when.

A step takes the best candidates over all beams, a candidate being a beam and one more token. One that ends, and is
among the `width` best, is a finished answer; the best that don't end are the next beams. The `width` best finished
answers are kept. Nothing here knows of sequences or blocks.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
from torch import Tensor

from model_runner.device_copies import to_device
from model_runner.request import BeamSearch, EarlyStopping, PositionLogprobs
from model_runner.sampling import logprobs

EndsText = Callable[[int, int], bool | None]
"""Whether the text of a beam, given by its index, is whole with one more token; None where it can't be with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """An answer under way: `token_id` and, before it, the tokens of `before`.

    total: the sum of the tokens' log-probabilities, added up in float32.
    """

    total: float = 0.0
    length: int = 0
    token_id: int = -1
    before: Beam | None = field(default=None, repr=False)
    logprobs: PositionLogprobs | None = None

    def path(self) -> list[Beam]:
        """This beam at the end, and before it all that it goes on from, without the one of no token."""
        path: list[Beam] = []
        beam = self
        while beam.before is not None:
            path.append(beam)
            beam = beam.before
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole answer. score: its total over its length ** length_penalty.

    by_token: an end token ends it; by_text: what its tokens say does; neither: only the limit.
    """

    score: float
    beam: Beam
    by_token: bool
    by_text: bool


@dataclass(frozen=True, slots=True)
class _Candidate:
    total: float
    parent: int
    token_id: int
    by_token: bool
    by_text: bool
    is_end: bool


class Search:
    """The state of one search. `beams` are best first, and so are `finished`, `width` of them at most."""

    def __init__(
        self,
        params: BeamSearch,
        limit: int,
        end_token_ids: frozenset[int] = frozenset(),
        top_logprobs: int | None = None,
    ) -> None:
        """limit: tokens of an answer at most.

        top_logprobs: how many candidates are reported beside each token; None for no log-probabilities.
        """
        self.limit = limit
        self.beams = [Beam()]
        self.finished: list[Finished] = []
        self.is_over = False
        self.num_tokens = 0
        """Tokens of all beams and answers, those that were dropped too."""
        self._params = params
        self._ends = end_token_ids
        self._top_logprobs = top_logprobs
        # So many that `width` beams can go on even if each beam's best candidates are all its ends.
        self._num_candidates = max(2, 1 + len(end_token_ids)) * params.width
        self._per_beam = 2 * params.width + len(end_token_ids)

    @property
    def length(self) -> int:
        """Tokens of each beam."""
        return self.beams[0].length

    def advance(self, logits: Tensor, edited: Tensor | None = None, ends_text: EndsText | None = None) -> list[int]:
        """Goes one token further, from float32 logits [beams, V]. Returns for each new beam the index of its parent.

        edited: the logits with what a request adds to them, by default the same. It counts in the log-probabilities,
        which are not normalised again, as transformers has it; -inf forbids a token. A beam that nothing may follow
        goes nowhere, so there may be fewer beams than `width`.
        """
        on: list[_Candidate] = []
        ended: list[_Candidate] = []
        for rank, candidate in enumerate(self._candidates(logits, logits if edited is None else edited, ends_text)):
            if not candidate.is_end:
                on.append(candidate)
            elif rank < self._params.width:
                ended.append(candidate)
            if len(on) == self._params.width and rank + 1 >= self._params.width:
                break
        made = self._extend(logits, [*ended, *on])
        self.num_tokens += len(made)
        for candidate, beam in zip(ended, made, strict=False):
            self._finish(beam, candidate)
        self.beams = made[len(ended) :] or self.beams
        self.is_over = not on or self._is_settled()
        return [candidate.parent for candidate in on]

    def _candidates(self, logits: Tensor, edited: Tensor, ends_text: EndsText | None) -> Iterator[_Candidate]:
        """The best candidates, best first; among equals those of the better beam, then of the lower token id."""
        found: list[tuple[float, int, int]] = []
        rows = _likeliest(logits, edited, min(self._num_candidates, self._per_beam))
        for parent, (beam, row) in enumerate(zip(self.beams, rows, strict=True)):
            before = np.float32(beam.total)
            found += [(float(before + np.float32(value)), parent, token_id) for token_id, value in row if value > -inf]
        found.sort(key=lambda each: -each[0])
        judged = (self._judge(*each, ends_text) for each in found[: self._num_candidates])
        return (candidate for candidate in judged if candidate is not None)

    def _judge(self, total: float, parent: int, token_id: int, ends_text: EndsText | None) -> _Candidate | None:
        by_token = token_id in self._ends
        by_text = False if ends_text is None or by_token else ends_text(parent, token_id)
        if by_text is None:
            return None
        is_end = by_token or by_text or self.length + 1 >= self.limit
        return _Candidate(total, parent, token_id, by_token, by_text, is_end)

    def _extend(self, logits: Tensor, candidates: Sequence[_Candidate]) -> list[Beam]:
        positions: Sequence[PositionLogprobs | None] = [None] * len(candidates)
        if self._top_logprobs is not None and candidates:
            rows = to_device(torch.tensor([each.parent for each in candidates]), logits.device)
            token_ids = to_device(torch.tensor([each.token_id for each in candidates]), logits.device)
            positions = logprobs(logits[rows], token_ids, [self._top_logprobs] * len(candidates))
        length = self.length + 1
        return [
            Beam(each.total, length, each.token_id, self.beams[each.parent], position)
            for each, position in zip(candidates, positions, strict=True)
        ]

    def _finish(self, beam: Beam, candidate: _Candidate) -> None:
        score = beam.total / beam.length**self._params.length_penalty
        finished = Finished(score, beam, candidate.by_token, candidate.by_text)
        # To the right of its equals: who finished first stays.
        insort(self.finished, finished, key=lambda each: -each.score)
        del self.finished[self._params.width :]

    def _is_settled(self) -> bool:
        """Whether the finished answers are the result although beams could go on."""
        if len(self.finished) < self._params.width:
            return False
        if self._params.early_stopping is EarlyStopping.FIRST:
            return True
        best, penalty = self.beams[0], self._params.length_penalty
        to_the_end = self._params.early_stopping is EarlyStopping.NEVER and penalty > 0
        length = self.limit if to_the_end else best.length
        return not best.total / length**penalty > self.finished[-1].score


def _likeliest(logits: Tensor, edited: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row of `edited` its `count` best token ids, with log-probabilities under `logits`; both float32 [R, V].

    What was added to the logits is in the log-probabilities, which are not normalised again.
    """
    if edited is logits:
        return [list(top) for top in _tops(logits, count)]
    norms = [float(logits[row, token_id]) - logprob for row, ((token_id, logprob),) in enumerate(_tops(logits, 1))]
    found: list[list[tuple[int, float]]] = []
    for row, norm in enumerate(norms):
        if not edited[row].max() > -inf:
            found.append([])
            continue
        ids = [token_id for token_id, _ in _tops(edited[row, None], count)[0]]
        found.append([(each, value - norm) for each, value in zip(ids, edited[row, ids].tolist(), strict=True)])
    return found


def _tops(logits: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """The `count` best token ids of each row, equals by lower id, with their log-probabilities."""
    any_token = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    return [position.top if position else () for position in logprobs(logits, any_token, [count] * len(logits))]
