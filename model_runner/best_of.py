"""Answers that wait until all are there, so that the likeliest can go out first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from model_runner.request import Chunk, FinishReason, PositionLogprobs, Usage


@dataclass(slots=True)
class _Draft:
    """One answer drawn so far, and its last chunk. total: the sum of its tokens' log-probabilities."""

    last: Chunk
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    total: float = 0.0

    @property
    def score(self) -> float:
        """The mean; an answer of no token at all is the least likely."""
        return self.total / len(self.token_ids) if self.token_ids else -inf

    def add(self, chunk: Chunk, logprobs: Iterable[float]) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        # One by one, so that the sum does not depend on how an answer is cut into chunks.
        for logprob in logprobs:
            self.total += logprob
        self.last = chunk

    def whole(self) -> Chunk:
        """All of it as one chunk, with its mean log-probability as score."""
        return replace(
            self.last,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=tuple(self.logprobs),
            score=self.score,
            usage=None,
        )


class BestOf:
    """The answers drawn for one request, by choice index."""

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}

    def add(self, chunk: Chunk, logprobs: Iterable[float]) -> None:
        """Takes a chunk with the natural log-probabilities of its tokens."""
        self._drafts.setdefault(chunk.choice_index, _Draft(chunk)).add(chunk, logprobs)

    def best(self, count: int, usage: Usage, prompt: tuple[PositionLogprobs, ...] = ()) -> list[Chunk]:
        """The `count` likeliest, best first, numbered anew; of two equal ones the one with the lower seed."""
        by_seed = [draft for _, draft in sorted(self._drafts.items())]
        best = sorted(by_seed, key=lambda draft: -draft.score)[:count]
        return number([draft.whole() for draft in best], usage, prompt)


def number(answers: list[Chunk], usage: Usage, prompt: tuple[PositionLogprobs, ...] = ()) -> list[Chunk]:
    """Gives one answer or more, best first, their indices, the first what is said of the prompt, the last the usage."""
    chunks = [replace(answer, choice_index=index) for index, answer in enumerate(answers)]
    chunks[0] = replace(chunks[0], prompt_logprobs=prompt)
    chunks[-1] = replace(chunks[-1], usage=usage)
    return chunks


def aborted(request_id: str, count: int, usage: Usage) -> list[Chunk]:
    """Ends `count` choices of which nothing has gone out."""
    nothing = Chunk(request_id, 0, (), "", finish_reason=FinishReason.ABORT)
    return number([nothing] * count, usage)
