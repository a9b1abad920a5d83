"""The step that takes the most memory: as many tokens as fit, in as many sequences, with logits of each token."""

from __future__ import annotations

import torch

from model_runner.batch import BatchEntry
from model_runner.executor import TorchExecutor
from model_runner.prompt_logprobs import draw_rows
from model_runner.request import SamplingParams
from model_runner.sampling import sample
from model_runner.sampling_rows import SamplingRows

NUM_BLOCKS = 2
"""Blocks of the cache that it needs, the null block included."""


@torch.inference_mode()
def run_largest_step(executor: TorchExecutor, max_tokens: int, max_sequences: int, block_size: int) -> None:
    """Computes max_tokens tokens in max_sequences sequences, or in one for each token, and draws for each sequence.

    What the step is about means nothing: all sequences write to the one block that there is.
    """
    entries = largest_entries(max_tokens, max_sequences, block_size)
    logits = executor.execute(entries, [])
    drawn = len(entries)
    params = [SamplingParams(temperature=1.0, top_p=0.5)] * drawn
    sample(logits, SamplingRows.of(params, [0] * drawn, [0] * drawn), source=draw_rows(entries))


def largest_entries(max_tokens: int, max_sequences: int, block_size: int) -> list[BatchEntry]:
    """The tokens are shared out evenly; the first sequences have one more when that does not go up."""
    sequences = min(max_tokens, max_sequences)
    each, more = divmod(max_tokens, sequences)
    counts = [each + (row < more) for row in range(sequences)]
    # The log-probabilities of prompts want the logits of every token.
    return [BatchEntry([0] * count, 0, [1] * -(-count // block_size), num_logits=count) for count in counts]
