"""From logits to chunks: draws the next token of each sequence, splits choices, decides who is done."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_runner.detokenizer import Detokenizer
from model_runner.observer import EngineObserver
from model_runner.request import Chunk, FinishReason, GenerateRequest, PositionLogprobs
from model_runner.sampling import SamplingRows, logprobs, sample
from model_runner.sequence import LiveRequest, Sequence
from model_runner.token_text import Tokenizer

_SEED_BITS = 64


@dataclass(slots=True)
class Outcome:
    """What a step brought: the chunks to deliver, the sequences that are done, and by parent the new children."""

    chunks: list[Chunk] = field(default_factory=list)
    finished: list[Sequence] = field(default_factory=list)
    forks: list[tuple[Sequence, list[Sequence]]] = field(default_factory=list)
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def note_draft(self, sequence: Sequence, accepted: int) -> None:
        """Counts a draft that was verified, and how many of its tokens became the sequence's."""
        drafted = len(sequence.draft)
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        sequence.live.drafted_tokens += drafted
        sequence.live.accepted_tokens += accepted


class Generation:
    """Knows how answers go on and end; knows nothing of blocks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_sequence_tokens: int,
        observer: EngineObserver,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_sequence_tokens = max_sequence_tokens
        self._observer = observer

    def first_sequence(self, live: LiveRequest) -> Sequence:
        """The sequence that computes the prompt; it becomes choice 0."""
        return self._choice(live, 0, list(live.request.prompt_token_ids))

    def advance(self, ready: Seq[Sequence], logits: Tensor, now: float) -> Outcome:
        """The next tokens of each of `ready`: one, and those before it that its draft had right.

        logits: float32 [R, V]; each sequence has a row for its next token, and one behind each token of its draft. A
        prompt that is complete for the first time splits into its choices here, which all draw from one row.
        """
        outcome = Outcome()
        rows: list[int] = []
        drawing: list[Sequence] = []
        row = 0
        for sequence in ready:
            width = 1 + len(sequence.draft)
            for each in (sequence, *self._split(sequence, outcome)):
                rows.extend(range(row, row + width))
                drawing.append(each)
            row += width
        if len(rows) > row:
            logits = logits[torch.tensor(rows, device=logits.device)]
        token_ids, positions = _draw(logits, drawing)
        row = 0
        for sequence in drawing:
            last = row + agreeing(sequence.draft, token_ids[row : row + len(sequence.draft)])
            self._accept(sequence, token_ids[row : last + 1], positions[row : last + 1], now, outcome)
            row += 1 + len(sequence.draft)
            sequence.draft = ()
        return outcome

    def _choice(self, live: LiveRequest, index: int, token_ids: list[int]) -> Sequence:
        request = live.request
        seed = secrets.randbits(_SEED_BITS) if request.sampling.seed is None else request.sampling.seed + index
        return Sequence(
            live=live,
            choice_index=index,
            sequence_id=f"{request.request_id}/{index}",
            token_ids=token_ids,
            seed=seed % (1 << _SEED_BITS),
            detokenizer=Detokenizer(self._tokenizer, request.stop.stop_strings),
        )

    def _split(self, parent: Sequence, outcome: Outcome) -> list[Sequence]:
        live = parent.live
        if live.forked:
            return []
        live.forked = True
        children = [self._choice(live, index, parent.token_ids[:]) for index in range(1, live.request.num_choices)]
        for child in children:
            # Also if its fork fails: it is not looked up as a new prompt then.
            child.admitted_before = True
        live.sequences.extend(children)
        if children:
            outcome.forks.append((parent, children))
        return children

    def _accept(
        self,
        sequence: Sequence,
        token_ids: Seq[int],
        positions: Seq[PositionLogprobs | None],
        now: float,
        outcome: Outcome,
    ) -> None:
        """Appends drawn tokens until one ends the choice, and says what the client sees of them.

        All but the last were in the draft, so that their K/V is there.
        """
        live = sequence.live
        text = ""
        stop_token_id: int | None = None
        stop_string: str | None = None
        kept = 0
        while kept < len(token_ids) and sequence.finish_reason is None:
            self._append(sequence, token_ids[kept], now)
            new_text, stop_token_id, stop_string = self._read(sequence, token_ids[kept])
            text += new_text
            kept += 1
        accepted = min(kept, len(token_ids) - 1)
        sequence.computed += accepted
        outcome.note_draft(sequence, accepted)
        if sequence.finish_reason is not None:
            live.sequences.remove(sequence)
            outcome.finished.append(sequence)
        outcome.chunks.append(
            Chunk(
                request_id=live.request.request_id,
                choice_index=sequence.choice_index,
                token_ids=tuple(token_ids[:kept]),
                text=text,
                logprobs=tuple(position for position in positions[:kept] if position is not None),
                finish_reason=sequence.finish_reason,
                stop_token_id=stop_token_id,
                stop_string=stop_string,
                usage=None if live.sequences else live.usage(now),
            )
        )

    def _append(self, sequence: Sequence, token_id: int, now: float) -> None:
        sequence.token_ids.append(token_id)
        sequence.num_outputs += 1
        sequence.live.output_tokens += 1
        self._note_times(sequence, now)

    def _read(self, sequence: Sequence, token_id: int) -> tuple[str, int | None, str | None]:
        """The new text, and the token or string that ends the choice, if one does."""
        stop = sequence.live.request.stop
        is_eos = token_id in self._eos_token_ids and not stop.ignore_eos
        if is_eos or token_id in stop.stop_token_ids:
            sequence.finish_reason = FinishReason.STOP
            text = sequence.detokenizer.finish()
            stop_string = sequence.detokenizer.stop_string
            return text, None if stop_string else token_id, stop_string
        delta = sequence.detokenizer.push((token_id,))
        if delta.stop_string is not None:
            sequence.finish_reason = FinishReason.STOP
            return delta.text, None, delta.stop_string
        if self._is_full(sequence, stop.max_tokens):
            text = delta.text + sequence.detokenizer.finish()
            stop_string = sequence.detokenizer.stop_string
            sequence.finish_reason = FinishReason.STOP if stop_string else FinishReason.LENGTH
            return text, None, stop_string
        return delta.text, None, None

    def _is_full(self, sequence: Sequence, max_tokens: int | None) -> bool:
        # The newest token has no K/V yet: it may be one more than the cache can hold.
        return sequence.num_outputs == max_tokens or len(sequence.token_ids) > self._max_sequence_tokens

    def _note_times(self, sequence: Sequence, now: float) -> None:
        live = sequence.live
        if live.first_token_at is None:
            live.first_token_at = now
            self._observer.on_first_token(now - live.arrived_at)
        if sequence.num_outputs > 1:
            self._observer.on_next_token(now - sequence.last_token_at)
        sequence.last_token_at = live.last_token_at = now


def agreeing(draft: Seq[int], drawn: Seq[int]) -> int:
    """How many tokens of a draft, from its first, are the ones drawn in their places."""
    pairs = enumerate(zip(draft, drawn, strict=True))
    return next((place for place, (guess, token) in pairs if guess != token), len(draft))


def abort_chunk(sequence: Sequence, now: float) -> Chunk:
    """Ends one choice without another token; the held-back text goes out."""
    live = sequence.live
    sequence.finish_reason = FinishReason.ABORT
    live.sequences.remove(sequence)
    return Chunk(
        request_id=live.request.request_id,
        choice_index=sequence.choice_index,
        token_ids=(),
        text=sequence.detokenizer.finish(),
        finish_reason=FinishReason.ABORT,
        usage=None if live.sequences else live.usage(now),
    )


def _draw(logits: Tensor, drawing: Seq[Sequence]) -> tuple[list[int], list[PositionLogprobs | None]]:
    """A token for each row of logits, with its log-probabilities. A draft makes several rows of a sequence.

    Each row is drawn as if the tokens of the draft before it had been taken: if they were not, nobody looks at it.
    """
    drawn = [(sequence, ahead) for sequence in drawing for ahead in range(1 + len(sequence.draft))]
    requests: list[GenerateRequest] = [sequence.live.request for sequence, _ in drawn]
    rows = SamplingRows.of(
        [request.sampling for request in requests],
        [sequence.seed for sequence, _ in drawn],
        [len(sequence.token_ids) + ahead for sequence, ahead in drawn],
    )
    token_ids = sample(logits, rows)
    positions = logprobs(logits, token_ids, [request.logprobs for request in requests])
    return token_ids.tolist(), positions
