"""Which rows of a step's logits are for draws, and the log-probabilities of prompts out of the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from model_runner.batch import BatchEntry
from model_runner.sampling import logprobs
from model_runner.sequence import Sequence as LiveSequence


def draw_rows(entries: Sequence[BatchEntry]) -> list[int]:
    """For each entry the row of the logits that follow its last token; of no meaning where it has none."""
    return [end - 1 for end in accumulate(entry.num_logits for entry in entries)]


def note_prompt_logprobs(sequences: Sequence[LiveSequence], entries: Sequence[BatchEntry], logits: Tensor) -> None:
    """Keeps the log-probabilities of prompt tokens that a step's logits tell, for requests that want them.

    logits: float32 [S, V], of the entries, one of each sequence.
    """
    for sequence, entry, row in zip(sequences, entries, draw_rows(entries), strict=True):
        if sequence.live.wants_prompt_logprobs and entry.num_logits:
            _note(sequence, entry, range(row + 1 - entry.num_logits, row + 1), logits)


def _note(sequence: LiveSequence, entry: BatchEntry, rows: Sequence[int], logits: Tensor) -> None:
    live = sequence.live
    first = len(live.prompt_logprobs) + 1
    end = entry.first_position + len(entry.token_ids) + 1
    followers = sequence.token_ids[first:end]
    # The prompt's last token is followed by none: its logits are for the draw.
    counts = [live.request.prompt_logprobs] * len(followers)
    positions = logprobs(logits, torch.tensor(followers, dtype=torch.int64), counts, rows[: len(followers)])
    live.prompt_logprobs.extend(position for position in positions if position is not None)
