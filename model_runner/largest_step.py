"""The step that takes the most memory: as many tokens as fit, in as many sequences, with logits of each token."""

from __future__ import annotations

import torch

from model_runner.batch import BatchEntry
from model_runner.device_copies import Lane
from model_runner.draws import Draws
from model_runner.executor import TorchExecutor
from model_runner.prompt_logprobs import draw_rows
from model_runner.request import MAX_LOGPROBS, SamplingParams
from model_runner.sampling import logprobs
from model_runner.sampling_rows import SamplingRows
from model_runner.steps import StepOrder
from model_runner.stream_steps import StreamSteps

NUM_BLOCKS = 2
"""Blocks of the cache that it needs, the null block included."""


@torch.inference_mode()
def run_largest_step(executor: TorchExecutor, lane: Lane, max_tokens: int, max_sequences: int, block_size: int) -> None:
    """Computes max_tokens tokens in max_sequences sequences, or in one for each token, and draws for each sequence.

    It draws as steps in the stream do, which sort whole rows for a nucleus, and tells as many log-probabilities as a
    request may ask for, of the draws and then of all tokens, as if they were prompts'. What the step is about means
    nothing: all sequences write to the one block that there is.
    """
    entries = largest_entries(max_tokens, max_sequences, block_size)
    drawn = len(entries)
    rows = SamplingRows.of([SamplingParams(temperature=1.0, top_p=0.5)] * drawn, [0] * drawn, [0] * drawn)
    order = StepOrder(entries, [], Draws(draw_rows(entries), rows, None, [MAX_LOGPROBS] * drawn))
    logits = StreamSteps(executor, lane).launch(order, None).wait().logits
    logprobs(logits, torch.zeros(len(logits), dtype=torch.int64), [MAX_LOGPROBS] * len(logits))


def largest_entries(max_tokens: int, max_sequences: int, block_size: int) -> list[BatchEntry]:
    """The tokens are shared out evenly; the first sequences have one more when that does not go up."""
    sequences = min(max_tokens, max_sequences)
    each, more = divmod(max_tokens, sequences)
    counts = [each + (row < more) for row in range(sequences)]
    # The log-probabilities of prompts want the logits of every token.
    return [BatchEntry([0] * count, 0, [1] * -(-count // block_size), num_logits=count) for count in counts]
