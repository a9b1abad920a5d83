"""How much the scheduler may plan for a step, and in which order requests are served."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.waiting_line import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """block_size in tokens; at most max_sequences run and max_batched_tokens are computed in a step.

    prefill_chunk_tokens caps one prompt's share of a step; 0: the budget alone does. speculative_tokens are guessed at
    most for a sequence in a step, by looking up n-grams of speculative_ngram tokens and less; 0: nothing is guessed.
    """

    block_size: int
    max_sequences: int = 64
    max_batched_tokens: int = 512
    prefill_chunk_tokens: int = 0
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    speculative_tokens: int = 0
    speculative_ngram: int = 3

    @property
    def slots(self) -> int:
        """Sequences that may run at once: no more than tokens in a step, so that each advances in every step."""
        return min(self.max_sequences, self.max_batched_tokens)

    @property
    def chunk(self) -> int:
        return self.prefill_chunk_tokens or self.max_batched_tokens
