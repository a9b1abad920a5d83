"""The steps that take the most memory: as many tokens as fit, in as many sequences, with all that may be asked of them.

Which takes the most is a matter of sizes and of who draws, so each kind is run, on a cache in which all sequences write
to the one block that there is; what they are about means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from model_runner.batch import BatchEntry
from model_runner.device_copies import Lane
from model_runner.draws import Draws
from model_runner.executor import TorchExecutor
from model_runner.logit_edits import LogitEdits, mask_of
from model_runner.prompt_logprobs import draw_rows
from model_runner.request import MAX_BIASED_TOKENS, MAX_LOGPROBS, MAX_TEMPERATURE, SamplingParams
from model_runner.sampling import logprobs
from model_runner.sampling_device import Sampler
from model_runner.sampling_rows import SamplingRows
from model_runner.steps import StepOrder
from model_runner.stream_steps import StreamSteps

NUM_BLOCKS = 2
"""Blocks of the cache that it needs, the null block included."""
_WIDE = SamplingParams(temperature=MAX_TEMPERATURE, top_p=0.99, min_p=1e-3)
"""A nucleus of nearly all tokens, for which whole rows are sorted."""


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What a step may have at most: tokens, and sequences; and what is drawn in it.

    guesses: draws for a sequence beside its own. longest: tokens of a sequence. runs_ahead: whether a step is launched
    while another one is in flight. sampler: draws for rows that it takes in such steps.
    """

    tokens: int
    sequences: int
    block_size: int
    longest: int
    guesses: int = 0
    runs_ahead: bool = True
    sampler: Sampler | None = None

    @property
    def draws(self) -> int:
        return min(self.tokens, self.sequences * (1 + self.guesses))


@torch.inference_mode()
def run_largest_step(executor: TorchExecutor, lane: Lane, bounds: StepBounds) -> None:
    """Computes a step that the engine draws from, then steps in flight that draw themselves."""
    _run_alone(executor, bounds)
    if bounds.runs_ahead:
        _run_ahead(StreamSteps(executor, lane), bounds, replace(_WIDE, seed=0))
        if bounds.sampler is not None:
            _run_ahead(StreamSteps(executor, lane, bounds.sampler), bounds, _WIDE)


def largest_entries(bounds: StepBounds, *, all_logits: bool) -> list[BatchEntry]:
    """The tokens are shared out evenly; the first sequences have one more when that does not go up.

    all_logits: those of each token, as the log-probabilities of prompts want them, or those of each sequence's last.
    """
    sequences = min(bounds.tokens, bounds.sequences)
    each, more = divmod(bounds.tokens, sequences)
    counts = [each + (row < more) for row in range(sequences)]
    size = bounds.block_size
    return [BatchEntry([0] * count, 0, [1] * -(-count // size), count if all_logits else 1) for count in counts]


def _run_alone(executor: TorchExecutor, bounds: StepBounds) -> None:
    """Edits and draws as many rows as may be, and tells the log-probabilities of the draws and of all tokens."""
    logits = executor.execute(largest_entries(bounds, all_logits=True), [])
    edits = [_largest_edits(logits.shape[1], bounds.longest)] * bounds.draws
    rows = _rows(replace(_WIDE, seed=0), bounds.draws)
    Draws(range(bounds.draws), rows, edits, [MAX_LOGPROBS] * bounds.draws).draw(logits)
    logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), [MAX_LOGPROBS] * len(logits))


def _run_ahead(steps: StreamSteps, bounds: StepBounds, sampling: SamplingParams) -> None:
    """Two steps in flight, of which each draws for each sequence and tells log-probabilities."""
    entries = largest_entries(bounds, all_logits=False)
    count = len(entries)
    order = StepOrder(entries, [], Draws(draw_rows(entries), _rows(sampling, count), None, [MAX_LOGPROBS] * count))
    before = steps.launch(order, None)
    launched = steps.launch(order, before)
    for each in (before, launched):
        each.wait()


def _rows(sampling: SamplingParams, count: int) -> SamplingRows:
    return SamplingRows.of([sampling] * count, [0] * count, [0] * count)


def _largest_edits(vocabulary: int, longest: int) -> LogitEdits:
    """Penalties for as many tokens as a sequence can have, biases, and a form that lets all come."""
    seen = np.arange(min(longest, vocabulary), dtype=np.int32)
    biased = np.arange(min(MAX_BIASED_TOKENS, vocabulary), dtype=np.int32)
    return LogitEdits(
        repetition=1.1,
        frequency=0.1,
        presence=0.1,
        seen=seen,
        counts=np.ones(len(seen), dtype=np.int32),
        biased=biased,
        biases=np.ones(len(biased), dtype=np.float32),
        mask=mask_of(range(vocabulary), vocabulary),
    )
