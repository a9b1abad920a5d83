"""From logits to chunks: draws the next token of each sequence, splits choices, decides who is done."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from model_runner.admission import SearchRoom
from model_runner.beam_steps import Searcher
from model_runner.best_of import BestOf, aborted
from model_runner.detokenizer import Detokenizer
from model_runner.device_copies import to_device
from model_runner.draws import Drawn, Draws
from model_runner.logit_rules import LogitRules
from model_runner.observer import EngineObserver
from model_runner.outcome import Outcome
from model_runner.progress import Progress
from model_runner.request import Chunk, FinishReason, PositionLogprobs
from model_runner.sampling_rows import NO_TOKEN
from model_runner.sequence import LiveRequest, Sequence
from model_runner.token_text import Tokenizer

_SEED_BITS = 64


class Generation:
    """Knows how answers go on and end; knows nothing of blocks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        eos_token_ids: frozenset[int],
        max_sequence_tokens: int,
        observer: EngineObserver,
        search_room: SearchRoom,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._max_sequence_tokens = max_sequence_tokens
        self._search_room = search_room
        self._progress = Progress(observer)
        self._searcher = Searcher(eos_token_ids, self._progress)

    @property
    def generated_tokens(self) -> int:
        """All tokens so far, over all requests."""
        return self._progress.generated_tokens

    def first_sequence(self, live: LiveRequest) -> Sequence:
        """The sequence that computes the prompt; it becomes choice 0, or the first beam."""
        request, prompt_tokens = live.request, len(live.request.prompt_token_ids)
        limit = self._search_room.limit(prompt_tokens, request.num_sequences)
        live.search = self._searcher.begin(live, min(limit, self._max_sequence_tokens - prompt_tokens + 1))
        live.best_of = BestOf() if request.is_best_of else None
        sequence = self._choice(live, 0, list(request.prompt_token_ids))
        live.no_text = sequence.detokenizer.copy()
        return sequence

    def ends_for_certain(self, sequence: Sequence) -> bool:
        """Whether the next token of a sequence that waits for no draw ends it, whichever it is."""
        return self._is_full(sequence, sequence.live.request.stop.max_tokens, sequence.coming + 1)

    def take_drawn(self, ready: Seq[Sequence], drawn: Seq[int], result: Drawn, now: float) -> Outcome:
        """The next token of each of `ready`, which was drawn with its step; none of them needs_its_draw.

        drawn: which of the step's draws is whose.
        """
        outcome = Outcome()
        for index, sequence in zip(drawn, ready, strict=True):
            self._split(sequence, outcome)
            own = slice(index, index + 1)
            self._take_draw(sequence, result.token_ids[own], result.positions[own], now, outcome)
        return outcome

    def advance(self, ready: Seq[Sequence], rows: Seq[int], logits: Tensor, now: float) -> Outcome:
        """The next tokens of each of `ready`: those that its draft had right, and one more.

        Their logits are in `rows` [R] of `logits`, float32 [S, V]; where there is a draft, the row is the one behind
        its last token. A prompt that is complete for the first time splits into its choices here, which all draw from
        one row. Of a search, all beams must be among `ready`, or none.
        """
        outcome = Outcome()
        source: list[int] = []
        drawing: list[Sequence] = []
        beams: dict[Sequence, int] = {}
        for row, sequence in zip(rows, ready, strict=True):
            if sequence.is_beam:
                beams[sequence] = row
                continue
            for each in (sequence, *self._split(sequence, outcome)):
                source.extend(range(row - len(each.draft), row + 1))
                drawing.append(each)
        if drawing:
            self._draw_all(drawing, source, logits, now, outcome)
        for live in dict.fromkeys(sequence.live for sequence in beams):
            if live.search is not None:
                own = to_device(torch.tensor([beams[sequence] for sequence in live.sequences]), logits.device)
                self._searcher.advance(live, live.search, logits[own], now, outcome)
        return outcome

    def _draw_all(
        self, drawing: list[Sequence], source: list[int], logits: Tensor, now: float, outcome: Outcome
    ) -> None:
        drawn = Draws.of(source, drawing, logits.shape[1]).draw(logits)
        first = 0
        for sequence in drawing:
            last = first + len(sequence.draft)
            right = agreeing(sequence.draft, drawn.token_ids[first:last]) if sequence.draft else 0
            taken = slice(first, first + right + 1)
            first = last + 1
            self._take_draw(sequence, drawn.token_ids[taken], drawn.positions[taken], now, outcome)

    def _take_draw(
        self,
        sequence: Sequence,
        token_ids: Seq[int],
        positions: Seq[PositionLogprobs | None],
        now: float,
        outcome: Outcome,
    ) -> None:
        """One draw, and before it those that a draft had right."""
        live = sequence.live
        if list(token_ids) == [NO_TOKEN] and _is_unfinished(sequence):
            outcome.stuck.append(sequence)
            return
        chunk = self._accept(sequence, token_ids, positions, now)
        sequence.draft = ()
        if sequence.finish_reason is not None:
            outcome.finished.append(sequence)
        elif sequence.constraint is not None and sequence.constraint.failure:
            outcome.stuck.append(sequence)
        if live.best_of is None:
            outcome.chunks.append(chunk)
        else:
            outcome.chunks += _hold_back(live, live.best_of, chunk, positions)

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
                self._tokenizer,
                request.stop.stop_strings,
                unsearched_tokens=request.stop.min_tokens,
                include_stop_string=request.stop.include_stop_string,
                # A form counts every space.
                strip=live.constraint is None,
            ),
            constraint=None if live.constraint is None else live.constraint.copy(),
            rules=LogitRules.of(request, self._eos_token_ids),
        )

    def _split(self, parent: Sequence, outcome: Outcome) -> list[Sequence]:
        live = parent.live
        if live.forked:
            return []
        live.forked = True
        children = [self._choice(live, index, parent.token_ids[:]) for index in range(1, live.request.num_sequences)]
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
                self._take(sequence, token_id, now)
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
            logprobs=() if live.request.logprobs is None else tuple(filter(None, positions[:kept])),
            finish_reason=sequence.finish_reason,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
            usage=None if live.sequences else live.usage(now),
            prompt_logprobs=_of_prompt(live),
        )

    def _take(self, sequence: Sequence, token_id: int, now: float) -> None:
        self._progress.take(sequence, token_id, now)
        self._progress.count(sequence.live, 1)
        if sequence.constraint is not None:
            sequence.constraint.advance(token_id)

    def _read(self, sequence: Sequence, token_id: int) -> tuple[str, int | None, str | None]:
        """The new text, and the token or string that ends the choice, if one does."""
        stop = sequence.live.request.stop
        # A form allows an end token only where it is complete, and nothing can follow it.
        heeds_eos = not stop.ignore_eos or sequence.constraint is not None
        is_eos = heeds_eos and token_id in self._eos_token_ids
        if is_eos or token_id in stop.stop_token_ids or token_id == NO_TOKEN:
            sequence.finish_reason = FinishReason.STOP
            text = sequence.detokenizer.finish()
            stop_string = sequence.detokenizer.stop_string
            return text, None if stop_string or token_id == NO_TOKEN else token_id, stop_string
        delta = sequence.detokenizer.push((token_id,))
        if delta.stop_string is not None:
            sequence.finish_reason = FinishReason.STOP
            return delta.text, None, delta.stop_string
        is_over = sequence.constraint is not None and sequence.constraint.is_over
        if is_over or self._is_full(sequence, stop.max_tokens):
            text = delta.text + sequence.detokenizer.finish()
            stop_string = sequence.detokenizer.stop_string
            sequence.finish_reason = FinishReason.STOP if stop_string or is_over else FinishReason.LENGTH
            return text, None, stop_string
        return delta.text, None, None

    def _is_full(self, sequence: Sequence, max_tokens: int | None, more: int = 0) -> bool:
        """Whether a sequence has as many tokens as it may, once it has some more."""
        # The newest token has no K/V yet: it may be one more than the cache can hold.
        return sequence.num_outputs + more == max_tokens or len(sequence.token_ids) + more > self._max_sequence_tokens


def abort_chunks(live: LiveRequest, now: float) -> list[Chunk]:
    """Ends all choices of a request without another token; what was not to go out before the end stays behind."""
    if live.search is None and live.best_of is None:
        return [_abort_chunk(sequence, now) for sequence in list(live.sequences)]
    live.sequences = []
    return aborted(live.request.request_id, live.request.num_choices, live.usage(now))


def agreeing(draft: Seq[int], drawn: Seq[int]) -> int:
    """How many tokens of a draft, from its first, are the ones drawn in their places."""
    pairs = enumerate(zip(draft, drawn, strict=True))
    return next((place for place, (guess, token) in pairs if guess != token), len(draft))


def _is_unfinished(sequence: Sequence) -> bool:
    """Whether the text so far does not have the form that is asked for."""
    return sequence.constraint is not None and not sequence.constraint.is_complete


def describe_stuck(sequence: Sequence) -> str:
    """Why the form of a sequence among Outcome.stuck can't go on."""
    failure = sequence.constraint.failure if sequence.constraint is not None else ""
    reason = failure or "the request's other rules forbid every token that it allows"
    return f"The form cannot go on after {sequence.num_outputs} tokens: {reason}."


def _abort_chunk(sequence: Sequence, now: float) -> Chunk:
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
        prompt_logprobs=_of_prompt(live) if live.forked else (),
    )


def _of_prompt(live: LiveRequest) -> tuple[PositionLogprobs, ...]:
    """What a chunk takes along, if it goes out at once."""
    return () if live.best_of is not None else live.take_prompt_logprobs()


def _hold_back(
    live: LiveRequest, best_of: BestOf, chunk: Chunk, positions: Seq[PositionLogprobs | None]
) -> list[Chunk]:
    """Keeps a chunk until all answers are there; then the best of them. positions: of its tokens, in their order."""
    of_tokens = positions[: len(chunk.token_ids)]
    best_of.add(chunk, [position.logprob for position in of_tokens if position is not None])
    if chunk.usage is None:
        return []
    return best_of.best(live.request.num_choices, chunk.usage, live.take_prompt_logprobs())
