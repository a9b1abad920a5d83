"""Which guesses a step verifies beside its work: as many as its budget has left, and as there is room for.

A sequence that decodes gets a draft: tokens that prompt lookup takes to be the next ones. The step computes them behind
its one next token, and each is kept if it is the very token that is drawn in its place. Drafts hold nobody up: they get
what prompts leave of the budget, and blocks only where the books can spare them.
"""

from __future__ import annotations

from model_runner.books import KvBooks
from model_runner.prompt_lookup import PromptLookup
from model_runner.scheduler_limits import SchedulerLimits
from model_runner.sequence import Sequence
from model_runner.step_plan import StepPlan


class Drafter:
    """Writes the drafts of a step into its sequences. max_sequence_tokens: the longest that a sequence can become."""

    def __init__(self, books: KvBooks, limits: SchedulerLimits, max_sequence_tokens: int) -> None:
        self._books = books
        self._limits = limits
        self._max_sequence_tokens = max_sequence_tokens

    def draft(self, plan: StepPlan) -> None:
        """Adds drafts to a plan. Raises what the books raise."""
        if not self._limits.speculative_tokens:
            return
        budget = self._limits.max_batched_tokens - sum(work.num_tokens for work in plan.work)
        drafted: list[Sequence] = []
        for work in plan.work:
            if budget <= 0:
                break
            sequence = work.sequence
            sequence.draft = self._guess(sequence, budget)
            budget -= len(sequence.draft)
            if sequence.draft:
                drafted.append(sequence)
        self._find_room(drafted, plan)

    def _guess(self, sequence: Sequence, budget: int) -> tuple[int, ...]:
        if not _may_guess(sequence):
            return ()
        # One token comes even if no guess is right.
        count = min(self._limits.speculative_tokens, budget, self._tokens_left(sequence) - 1)
        if count <= 0:
            return ()
        if sequence.lookup is None:
            sequence.lookup = PromptLookup(self._limits.speculative_ngram)
        return sequence.lookup.draft(sequence.token_ids, count)

    def _tokens_left(self, sequence: Sequence) -> int:
        """How many tokens it can still get. The last of them needs no place, for it is never computed."""
        left = self._max_sequence_tokens + 1 - len(sequence.token_ids)
        max_tokens = sequence.live.request.stop.max_tokens
        return left if max_tokens is None else min(left, max_tokens - sequence.num_outputs)

    def _find_room(self, drafted: list[Sequence], plan: StepPlan) -> None:
        """Tells the books the drafts that need more blocks than there are; without them, drafts are cut."""
        size = self._limits.block_size
        short = [sequence for sequence in drafted if sequence.room(size) < len(sequence.draft)]
        if not short:
            return
        growth = self._books.extend([sequence.draft_update() for sequence in short])
        grants = {grant.sequence_id: grant for grant in growth.grants}
        for sequence in short:
            if sequence.sequence_id in growth.stalled:
                sequence.draft = sequence.draft[: sequence.room(size)]
            else:
                sequence.apply_draft(grants.get(sequence.sequence_id))
        plan.copies.extend(copy for grant in growth.grants for copy in grant.copies)


def _may_guess(sequence: Sequence) -> bool:
    """Whether it decodes, and its next tokens follow from its own draws alone."""
    decodes = sequence.pending == 1 and sequence.num_outputs > 0
    return decodes and sequence.constraint is None and sequence.live.request.beam_search is None
