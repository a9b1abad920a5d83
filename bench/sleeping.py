"""An executor without a model: what a step costs but for its forward pass."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder


class SleepingExecutor:
    """A model that takes a fixed time, in which other threads run, and then draws one and the same token."""

    def __init__(self, seconds: float, vocab_size: int, token_id: int) -> None:
        self._seconds = seconds
        self._row = torch.zeros(vocab_size)
        self._row[token_id] = 1.0

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> torch.Tensor:
        """float32 logits [entries that want them, vocab_size]."""
        time.sleep(self._seconds)
        return self._row.expand(sum(entry.num_logits for entry in entries), -1)
