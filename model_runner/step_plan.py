"""What the scheduler plans for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from model_runner.books import CopyOrder, Growth
from model_runner.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Work:
    """The next `num_tokens` tokens of one sequence."""

    sequence: Sequence
    num_tokens: int


@dataclass(slots=True)
class StepPlan:
    """What a step computes, the copies due before it, and how many sequences lost their blocks for it.

    prefill_tokens: of the work, tokens of prompts or computed again. stalled: ids of running sequences that sit the
    step out, because the books have no word on them for now. must_land: somebody has to give up blocks, which a step
    in flight may be writing: it must be done first, and nothing is planned.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[CopyOrder] = field(default_factory=list)
    preemptions: int = 0
    prefill_tokens: int = 0
    stalled: set[str] = field(default_factory=set)
    must_land: bool = False

    def apply(self, growth: Growth, due: list[Sequence]) -> None:
        """Takes over what the books answered to the updates of the sequences `due`."""
        by_id = {grant.sequence_id: grant for grant in growth.grants}
        for sequence in due:
            if sequence.sequence_id not in growth.stalled:
                sequence.apply(by_id.get(sequence.sequence_id))
        self.copies.extend(copy for grant in growth.grants for copy in grant.copies)
        self.stalled |= growth.stalled
