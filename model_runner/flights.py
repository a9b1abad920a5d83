"""Steps in flight: at most one runs while the next is planned, and what it draws is known when it has landed.

A step runs ahead when the next one can be planned without knowing what it draws. Its sequences go on from tokens that
are coming. Should such a token turn out to end its sequence, what the next step computes for it is in vain: it is
dropped, and the sequence's end waits until that step has landed too, for until then its blocks are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from model_runner.batch import BatchEntry
from model_runner.draws import Draws
from model_runner.generation import Generation
from model_runner.outcome import Outcome
from model_runner.prompt_logprobs import draw_rows, note_prompt_logprobs
from model_runner.sequence import Sequence
from model_runner.step_plan import StepPlan
from model_runner.steps import Launched, StepOrder, StepResult, Steps


@dataclass(frozen=True, slots=True, repr=False)
class Flight:
    """A step on its way.

    drawing: the sequences that it draws for, each with the row of its logits. draws: by sequence the number of its
    draw, when the step itself draws. late: the ends of sequences that are in this step in vain.
    """

    plan: StepPlan
    entries: Seq[BatchEntry]
    drawing: dict[Sequence, int]
    draws: dict[Sequence, int]
    launched: Launched
    runs_ahead: bool
    late: Outcome = field(default_factory=Outcome)


class Flights:
    """Launches and lands the steps of an engine, in order. runs_ahead: whether any step may."""

    def __init__(self, steps: Steps, generation: Generation, *, runs_ahead: bool) -> None:
        self._steps = steps
        self._generation = generation
        self._runs_ahead = runs_ahead
        self._flights: deque[Flight] = deque()

    def __bool__(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._flights)

    @property
    def must_land(self) -> bool:
        """Whether a step is in flight behind which none can be planned."""
        return bool(self._flights) and not self._flights[-1].runs_ahead

    def launch(self, plan: StepPlan) -> None:
        """Starts a step. Raises what the executor raises at once; then nothing was started."""
        before = self._flights[-1] if self._flights else None
        follows = {} if before is None else before.draws
        entries = [work.sequence.entry(work.num_tokens, follows.get(work.sequence)) for work in plan.work]
        rows = zip(plan.work, draw_rows(entries), strict=True)
        drawing = {work.sequence: row for work, row in rows if work.sequence.pending == work.num_tokens}
        runs_ahead = self._runs_ahead and not any(work.sequence.needs_its_draw for work in plan.work)
        draws: Draws | None = None
        numbers: dict[Sequence, int] = {}
        if runs_ahead and drawing:
            draws = Draws.of(list(drawing.values()), list(drawing), 0)
            numbers = {sequence: number for number, sequence in enumerate(drawing)}
        launched = self._steps.launch(StepOrder(entries, plan.copies, draws), before.launched if before else None)
        for work in plan.work:
            goes_on = work.sequence in numbers and not self._generation.ends_for_certain(work.sequence)
            work.sequence.launch(work.num_tokens, goes_on=goes_on)
        self._flights.append(Flight(plan, entries, drawing, numbers, launched, runs_ahead))

    def wait(self) -> tuple[Flight, StepResult]:
        """Waits for the first step in flight, which then is not any more. Raises what it raised, and then it stays."""
        flight = self._flights[0]
        result = flight.launched.wait()
        return self._flights.popleft(), result

    def land(self, flight: Flight, result: StepResult, now: float) -> Outcome:
        """What a step that is done brings. now: seconds on the engine's clock."""
        note_prompt_logprobs([work.sequence for work in flight.plan.work], flight.entries, result.logits)
        for work in flight.plan.work:
            if work.sequence.finish_reason is None:
                work.sequence.land(work.num_tokens)
        ready = [sequence for sequence in flight.drawing if sequence.finish_reason is None]
        for sequence in ready:
            sequence.coming -= sequence.coming > 0
        outcome = self._advance(flight, ready, result, now)
        for sequence in outcome.finished:
            sequence.coming = 0
        if self._flights:
            _put_off(outcome, self._flights[0])
        outcome.chunks[:0] = flight.late.chunks
        outcome.finished[:0] = flight.late.finished
        return outcome

    def _advance(self, flight: Flight, ready: list[Sequence], result: StepResult, now: float) -> Outcome:
        if not ready:
            return Outcome()
        if result.drawn is None:
            rows = [flight.drawing[sequence] for sequence in ready]
            return self._generation.advance(ready, rows, result.logits, now)
        return self._generation.take_drawn(ready, [flight.draws[each] for each in ready], result.drawn, now)

    def abandon(self) -> Outcome:
        """Waits until nothing is in flight, and takes nothing of what it brings but the ends that waited for it."""
        ends = Outcome()
        while self._flights:
            flight = self._flights.popleft()
            ends.chunks += flight.late.chunks
            ends.finished += flight.late.finished
            try:
                flight.launched.wait()
            except Exception:
                continue
        return ends


def _put_off(outcome: Outcome, newer: Flight) -> None:
    """Lets the ends of sequences that a newer step computes wait for it, with all chunks of their requests."""
    computed = {id(work.sequence) for work in newer.plan.work}
    late = {sequence.live.request.request_id for sequence in outcome.finished if id(sequence) in computed}
    if not late:
        return
    newer.late.chunks.extend(chunk for chunk in outcome.chunks if chunk.request_id in late)
    newer.late.finished.extend(each for each in outcome.finished if each.live.request.request_id in late)
    outcome.chunks = [chunk for chunk in outcome.chunks if chunk.request_id not in late]
    outcome.finished = [each for each in outcome.finished if each.live.request.request_id not in late]
