"""The draws of one step: which rows of its logits they are from, under what parameters, and what they bring."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from model_runner.logit_edits import LogitEdits
from model_runner.request import GenerateRequest, PositionLogprobs
from model_runner.sampling import logprobs, sample
from model_runner.sampling_rows import NO_TOKEN, SamplingRows
from model_runner.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens, or NO_TOKEN, and the log-probabilities of those whose requests ask for any: [R] each."""

    token_ids: list[int]
    positions: list[PositionLogprobs | None]


@dataclass(frozen=True, slots=True)
class Draws:
    """R draws, each from the row of the logits that `source` says.

    edits: what becomes of each row first; None when all stay as they are. top_n: of how many candidates a draw tells
    the log-probability beside its own; None for none at all.
    """

    source: Seq[int]
    rows: SamplingRows
    edits: Seq[LogitEdits | None] | None
    top_n: Seq[int | None]

    @classmethod
    def of(cls, source: Seq[int], drawing: Seq[Sequence], vocabulary: int) -> Draws:
        """A sequence draws once, and once after each token of its draft, as if the tokens before had been taken: if
        they were not, nobody looks at it. Whoever is ruled, or has a form, must know all of its tokens.

        vocabulary: of the logits; it matters to rules and forms alone.
        """
        draws = [(sequence, ahead) for sequence in drawing for ahead in range(1 + len(sequence.draft))]
        requests: list[GenerateRequest] = [sequence.live.request for sequence, _ in draws]
        rows = SamplingRows.of(
            [request.sampling for request in requests],
            [sequence.seed for sequence, _ in draws],
            [sequence.num_tokens + ahead for sequence, ahead in draws],
        )
        edits = None
        if any(sequence.rules or sequence.constraint for sequence in drawing):
            edits = [sequence.edits(vocabulary, sequence.draft[:ahead]) for sequence, ahead in draws]
        return cls(source, rows, edits, [_top_logprobs(request) for request in requests])

    def draw(self, logits: Tensor) -> Drawn:
        """Draws from logits, float32 [S, V], on the thread that calls."""
        tokens = sample(logits, self.rows, self.edits, self.source)
        token_ids = tokens.tolist()
        asked = [None if token == NO_TOKEN else count for token, count in zip(token_ids, self.top_n, strict=True)]
        return Drawn(token_ids, logprobs(logits, tokens, asked, self.source))


def _top_logprobs(request: GenerateRequest) -> int | None:
    return 0 if request.logprobs is None and request.is_best_of else request.logprobs
