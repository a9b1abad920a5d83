"""Beam searches in the engine: sequences that follow their beams, by forks and ends, and the answers at the end.

A search has one sequence for each beam, in the order of the beams, and all take each step together. The first child of
a beam goes on in its sequence, and so in its blocks; the others are forked from it. Who has no child ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from model_runner.beam_search import Finished, Search
from model_runner.best_of import number
from model_runner.constraint import Constraint
from model_runner.detokenizer import Detokenizer
from model_runner.logit_edits import apply_edits
from model_runner.outcome import Outcome
from model_runner.progress import Progress
from model_runner.request import Chunk, FinishReason
from model_runner.sequence import LiveRequest, Sequence


class Searcher:
    """Takes the steps of all searches, one after the other."""

    def __init__(self, eos_token_ids: frozenset[int], progress: Progress) -> None:
        self._eos_token_ids = eos_token_ids
        self._progress = progress

    def begin(self, live: LiveRequest, limit: int) -> Search | None:
        """The search that a request asks for, with answers of at most `limit` tokens; None when it asks for none."""
        request, stop = live.request, live.request.stop
        if request.beam_search is None:
            return None
        # A form allows an end token only where it is complete, and nothing can follow it.
        heeds_eos = not stop.ignore_eos or live.constraint is not None
        ends = stop.stop_token_ids | self._eos_token_ids if heeds_eos else stop.stop_token_ids
        if stop.max_tokens is not None:
            limit = min(limit, stop.max_tokens)
        return Search(request.beam_search, limit, ends, request.logprobs)

    def advance(self, live: LiveRequest, search: Search, logits: Tensor, now: float, outcome: Outcome) -> None:
        """One more token for each beam, whose next-token logits are the rows of `logits`, float32 [beams, V]."""
        children = live.unfold()
        if children:
            # What all begin with is computed again; now each computes the rest of its own.
            outcome.forks.append((live.sequences[0], children))
            return
        ahead = _Ahead(live.sequences, reads=bool(live.request.stop.stop_strings))
        already = search.num_tokens
        edited = apply_edits(logits, [sequence.edits(logits.shape[1]) for sequence in live.sequences])
        parents = search.advance(logits, edited, ahead.ends if ahead.is_needed else None)
        self._progress.count(live, search.num_tokens - already)
        live.forked = True
        self._progress.note_first(live.sequences[0], now)
        if not search.finished and search.is_over and live.constraint is not None:
            outcome.stuck.append(live.sequences[0])
        elif search.is_over:
            outcome.finished += live.sequences
            live.sequences = []
            outcome.chunks += number(_answers(live, search), live.usage(now), live.take_prompt_logprobs())
        else:
            live.sequences = self._descend(live, search, parents, ahead, now, outcome)

    def _descend(
        self,
        live: LiveRequest,
        search: Search,
        parents: list[int],
        ahead: _Ahead,
        now: float,
        outcome: Outcome,
    ) -> list[Sequence]:
        """The sequences of the new beams, each with its new token."""
        before = live.sequences
        families: dict[Sequence, list[Sequence]] = {}
        after: list[Sequence] = []
        for index in parents:
            parent = before[index]
            child = _fork(parent) if parent in families else parent
            families.setdefault(parent, []).append(child)
            after.append(child)
        for sequence, beam, index in zip(after, search.beams, parents, strict=True):
            self._progress.take(sequence, beam.token_id, now)
            if ahead.is_needed:
                sequence.detokenizer, sequence.constraint = ahead.after(index, beam.token_id)
        outcome.forks += [(parent, children[1:]) for parent, children in families.items() if len(children) > 1]
        outcome.finished += [sequence for sequence in before if sequence not in families]
        return after


class _Ahead:
    """The texts and forms of beams, and of what may follow them, as far as a step looks at it."""

    def __init__(self, beams: list[Sequence], *, reads: bool) -> None:
        """reads: texts matter, because stop strings are looked for."""
        self._before = [(beam.detokenizer, beam.constraint) for beam in beams]
        self._reads = reads
        self._after: dict[tuple[int, int], tuple[Detokenizer, Constraint | None]] = {}
        self.is_needed = reads or any(constraint is not None for _, constraint in self._before)

    def ends(self, beam: int, token_id: int) -> bool | None:
        """Whether a stop string ends the text of a beam and one more token, or their form is over; None when stuck."""
        detokenizer, constraint = self.after(beam, token_id)
        if constraint is not None and constraint.failure:
            return None
        return detokenizer.stop_string is not None or (constraint is not None and constraint.is_over)

    def after(self, beam: int, token_id: int) -> tuple[Detokenizer, Constraint | None]:
        """The text and form of a beam and one more token."""
        key = (beam, token_id)
        if key not in self._after:
            detokenizer, constraint = self._before[beam]
            if self._reads:
                detokenizer = detokenizer.copy()
                detokenizer.push((token_id,))
            if constraint is not None:
                constraint = constraint.copy()
                constraint.advance(token_id)
            self._after[key] = detokenizer, constraint
        return self._after[key]


def _fork(parent: Sequence) -> Sequence:
    """A sequence with the parent's tokens, under an id that no other sequence of the request has had."""
    live = parent.live
    live.num_named += 1
    return Sequence(
        live=live,
        choice_index=0,
        sequence_id=f"{live.request.request_id}/{live.num_named}",
        token_ids=parent.token_ids[:],
        seed=parent.seed,
        detokenizer=parent.detokenizer,
        rules=parent.rules,
        num_outputs=parent.num_outputs,
        last_token_at=parent.last_token_at,
        admitted_before=True,
    )


def _answers(live: LiveRequest, search: Search) -> list[Chunk]:
    """The best answers as one chunk each, best first."""
    best = search.finished[: live.request.num_choices]
    # Where every token is forbidden, there is no answer at all.
    nothing = Chunk(live.request.request_id, 0, (), "", finish_reason=FinishReason.LENGTH)
    return [_answer(live, each) for each in best] or [nothing]


def _answer(live: LiveRequest, finished: Finished) -> Chunk:
    path = finished.beam.path()
    token_ids = tuple(beam.token_id for beam in path)
    text, stop_string = _text(live, token_ids[:-1] if finished.by_token else token_ids)
    is_stopped = finished.by_token or finished.by_text or stop_string is not None
    return Chunk(
        request_id=live.request.request_id,
        choice_index=0,
        token_ids=token_ids,
        text=text,
        logprobs=tuple(beam.logprobs for beam in path if beam.logprobs is not None),
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        stop_token_id=token_ids[-1] if finished.by_token and stop_string is None else None,
        stop_string=stop_string,
        score=finished.score,
    )


def _text(live: LiveRequest, token_ids: Seq[int]) -> tuple[str, str | None]:
    """The text of an answer, and the stop string that ends it, if one does."""
    if live.no_text is None:
        return "", None
    detokenizer = live.no_text.copy()
    text = detokenizer.push(token_ids).text + detokenizer.finish()
    return text, detokenizer.stop_string
