"""Answers that wait until all are there, so that the likeliest can go out first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from model_runner.request import Chunk, FinishReason, PositionLogprobs, Usage


@dataclass(slots=True)
class _Draft:
    """One answer drawn so far. total: the sum of its tokens' log-probabilities."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    total: float = 0.0
    last: Chunk | None = None

    def add(self, chunk: Chunk, logprob: float) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.total += logprob
        self.last = chunk

    def whole(self) -> Chunk:
        """All of it as one chunk, with its mean log-probability as score."""
        if self.last is None:
            raise ValueError("an answer without a token can't be whole")
        return replace(
            self.last,
            token_ids=tuple(self.token_ids),
            text=self.text,
            logprobs=tuple(self.logprobs),
            score=self.total / len(self.token_ids),
            usage=None,
        )


class BestOf:
    """The answers drawn for one request, by choice index."""

    def __init__(self) -> None:
        self._drafts: dict[int, _Draft] = {}

    def add(self, chunk: Chunk, logprob: float) -> None:
        """Takes the chunk of one token, whose natural log-probability is `logprob`."""
        self._drafts.setdefault(chunk.choice_index, _Draft()).add(chunk, logprob)

    def best(self, count: int, usage: Usage) -> list[Chunk]:
        """The `count` likeliest, best first, numbered anew; of two equal ones the one with the lower seed."""
        drafts = [draft for _, draft in sorted(self._drafts.items())]
        answers = sorted((draft.whole() for draft in drafts), key=lambda answer: -(answer.score or 0.0))[:count]
        return number(answers, usage)


def number(answers: list[Chunk], usage: Usage) -> list[Chunk]:
    """Gives answers, best first, their choice indices, and the last one the usage. There must be one."""
    chunks = [replace(answer, choice_index=index) for index, answer in enumerate(answers)]
    chunks[-1] = replace(chunks[-1], usage=usage)
    return chunks


def aborted(request_id: str, count: int, usage: Usage) -> list[Chunk]:
    """Ends `count` choices of which nothing has gone out."""
    nothing = Chunk(request_id, 0, (), "", finish_reason=FinishReason.ABORT)
    return number([nothing] * count, usage)
