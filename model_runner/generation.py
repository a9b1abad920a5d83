"""From logits to chunks: draws the next token of each sequence, splits choices, decides who is done."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from model_runner.detokenizer import Detokenizer
from model_runner.logit_edits import LogitEdits
from model_runner.logit_rules import LogitRules
from model_runner.observer import EngineObserver
from model_runner.request import Chunk, FinishReason, GenerateRequest, PositionLogprobs
from model_runner.sampling import logprobs, sample
from model_runner.sampling_rows import NO_TOKEN, SamplingRows
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

    def advance(self, ready: Seq[Sequence], rows: Seq[int], logits: Tensor, now: float) -> Outcome:
        """The next tokens of each of `ready`: those that its draft had right, and one more.

        Their logits are in `rows` [R] of `logits`, float32 [S, V]; where there is a draft, the row is the one behind
        its last token. A prompt that is complete for the first time splits into its choices here, which all draw from
        one row.
        """
        outcome = Outcome()
        source: list[int] = []
        drawing: list[Sequence] = []
        for row, sequence in zip(rows, ready, strict=True):
            for each in (sequence, *self._split(sequence, outcome)):
                source.extend(range(row - len(each.draft), row + 1))
                drawing.append(each)
        token_ids, positions = _draw(logits, source, drawing)
        first = 0
        for sequence in drawing:
            last = first + len(sequence.draft)
            right = agreeing(sequence.draft, token_ids[first:last])
            end = first + right + 1
            chunk = self._accept(sequence, token_ids[first:end], positions[first:end], now)
            outcome.chunks.append(chunk)
            outcome.drafted_tokens += len(sequence.draft)
            outcome.accepted_tokens += min(right, len(chunk.token_ids))
            if sequence.finish_reason is not None:
                outcome.finished.append(sequence)
            sequence.draft = ()
            first = last + 1
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
            detokenizer=Detokenizer(
                self._tokenizer, request.stop.stop_strings, unsearched_tokens=request.stop.min_tokens
            ),
            rules=LogitRules.of(request, self._eos_token_ids),
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
        self, sequence: Sequence, token_ids: Seq[int], positions: Seq[PositionLogprobs | None], now: float
    ) -> Chunk:
        """Appends drawn tokens until one ends the choice, and says what the client sees of them.

        All but the last were in the draft, so that their K/V is there; the last may be NO_TOKEN.
        """
        live = sequence.live
        text = ""
        kept = 0
        for token_id in token_ids:
            if token_id != NO_TOKEN:
                kept += 1
                self._append(sequence, token_id, now)
            new_text, stop_token_id, stop_string = self._read(sequence, token_id)
            text += new_text
            if sequence.finish_reason is not None:
                live.sequences.remove(sequence)
                break
        accepted = min(kept, len(token_ids) - 1)
        sequence.computed += accepted
        live.drafted_tokens += len(sequence.draft)
        live.accepted_tokens += accepted
        return Chunk(
            request_id=live.request.request_id,
            choice_index=sequence.choice_index,
            token_ids=tuple(token_ids[:kept]),
            text=text,
            logprobs=tuple(position for position in positions[:kept] if position is not None),
            finish_reason=sequence.finish_reason,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
            usage=None if live.sequences else live.usage(now),
            prompt_logprobs=live.take_prompt_logprobs(),
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
        if is_eos or token_id in stop.stop_token_ids or token_id == NO_TOKEN:
            sequence.finish_reason = FinishReason.STOP
            text = sequence.detokenizer.finish()
            stop_string = sequence.detokenizer.stop_string
            return text, None if stop_string or token_id == NO_TOKEN else token_id, stop_string
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


def end_chunk(sequence: Sequence, reason: FinishReason, now: float) -> Chunk:
    """Ends one choice without another token; the held-back text goes out."""
    live = sequence.live
    sequence.finish_reason = reason
    live.sequences.remove(sequence)
    text = sequence.detokenizer.finish()
    return Chunk(
        request_id=live.request.request_id,
        choice_index=sequence.choice_index,
        token_ids=(),
        text=text,
        finish_reason=reason,
        stop_string=sequence.detokenizer.stop_string if reason is FinishReason.STOP else None,
        usage=None if live.sequences else live.usage(now),
        prompt_logprobs=live.take_prompt_logprobs() if live.forked else (),
    )


def _draw(logits: Tensor, source: Seq[int], drawing: Seq[Sequence]) -> tuple[list[int], list[PositionLogprobs | None]]:
    """Tokens, or NO_TOKEN, and log-probabilities; the logits of each draw are in the row that `source` says.

    A sequence draws once, and once after each token of its draft, as if the tokens before had been taken: if they were
    not, nobody looks at it.
    """
    draws = [(sequence, ahead) for sequence in drawing for ahead in range(1 + len(sequence.draft))]
    requests: list[GenerateRequest] = [sequence.live.request for sequence, _ in draws]
    rows = SamplingRows.of(
        [request.sampling for request in requests],
        [sequence.seed for sequence, _ in draws],
        [len(sequence.token_ids) + ahead for sequence, ahead in draws],
    )
    edits = None
    if any(sequence.rules or sequence.constraint for sequence in drawing):
        edits = [_edits(sequence, sequence.draft[:ahead], logits.shape[1]) for sequence, ahead in draws]
    drawn = sample(logits, rows, edits, source)
    token_ids = drawn.tolist()
    asked = [None if token == NO_TOKEN else each.logprobs for token, each in zip(token_ids, requests, strict=True)]
    return token_ids, logprobs(logits, drawn, asked, source)


def _edits(sequence: Sequence, draft: Seq[int], vocabulary: int) -> LogitEdits | None:
    form = None if sequence.constraint is None else sequence.constraint.mask()
    if sequence.rules is not None:
        return sequence.rules.edits(sequence.token_ids, vocabulary, form, draft)
    return None if form is None else LogitEdits(mask=form)
