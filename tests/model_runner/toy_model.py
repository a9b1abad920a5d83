"""A model that is a few lines of arithmetic, on a physical cache that forgives nothing.

The next token of a history is a fixed function of all its tokens, which the executor reads back through the block
table. So a wrong block, a lost copy, a slot written twice or read before it was written changes the answer, and the
right answer is known without any engine: `answer()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from torch import Tensor

from model_runner.batch import BatchEntry
from model_runner.books import CopyOrder
from model_runner.request import SamplingParams
from model_runner.sampling import sample
from model_runner.sampling_rows import SamplingRows

VOCAB_SIZE = 40


def next_logits(history: Sequence[int]) -> Tensor:
    """Float32 [VOCAB_SIZE]: a function of the whole history that any two histories hardly share."""
    digest = hashlib.shake_128(bytes(f"{list(history)}", "ascii")).digest(VOCAB_SIZE)
    return torch.tensor([byte / 32 for byte in digest], dtype=torch.float32)


def habitual_logits(history: Sequence[int]) -> Tensor:
    """Mostly a function of the last token, so that what has been is likely to be again; the rest shows a little."""
    return next_logits(history[-1:]) * 3 + next_logits(history) / 8


Model = Callable[[Sequence[int]], Tensor]
"""From a history to the logits of what follows."""


def answer(
    prompt: Sequence[int],
    count: int,
    sampling: SamplingParams | None = None,
    seed: int = 0,
    model: Model = next_logits,
) -> list[int]:
    """The first `count` tokens after `prompt`, drawn one by one without any cache."""
    history = list(prompt)
    for _ in range(count):
        rows = SamplingRows.of([sampling or SamplingParams()], [seed], [len(history)])
        history.append(int(sample(model(history)[None], rows)))
    return history[len(prompt) :]


class ToyExecutor:
    """Executes entries on a dictionary of slots. Reading a slot that nobody wrote raises KeyError."""

    def __init__(self, block_size: int, model: Model = next_logits) -> None:
        self.block_size = block_size
        self.model = model
        self.slots: dict[int, int] = {}
        self.computed_tokens = 0
        self.steps: list[list[int]] = []
        self.longest = 0
        """The most tokens that a sequence had with K/V."""
        self.before_step: dict[int, Callable[[], None]] = {}
        """What happens before the step of that number, in the engine's thread."""

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> Tensor:
        self.before_step.pop(len(self.steps), lambda: None)()
        size = self.block_size
        for copy in copies:
            for offset in range(copy.num_tokens):
                self.slots[copy.target * size + offset] = self.slots[copy.source * size + offset]
        self.steps.append([len(entry.token_ids) for entry in entries])
        # As on a device: everybody writes, then everybody reads.
        for entry in entries:
            for offset, token_id in enumerate(entry.token_ids):
                self.slots[self._slot(entry, entry.first_position + offset)] = token_id
        self.longest = max(self.longest, *(entry.first_position + len(entry.token_ids) for entry in entries))
        self.computed_tokens += sum(len(entry.token_ids) for entry in entries)
        rows = [self._logits(entry, back) for entry in entries for back in range(entry.num_logits)[::-1]]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB_SIZE)

    def _logits(self, entry: BatchEntry, back: int) -> Tensor:
        """Of the token `back` places before the entry's last."""
        length = entry.first_position + len(entry.token_ids) - back
        return self.model([self.slots[self._slot(entry, position)] for position in range(length)])

    def _slot(self, entry: BatchEntry, position: int) -> int:
        block = entry.block_table[position // self.block_size]
        assert block != 0, "the null block is in a block table"
        return block * self.block_size + position % self.block_size


class ToyTokenizer:
    """Token i is the letter at i of a short alphabet, so that texts can be written down."""

    LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"

    def __init__(self) -> None:
        vocabulary = {letter: index for index, letter in enumerate(self.LETTERS)}
        self.backend = Backend(BPE(vocab=vocabulary, merges=[]))
        self.backend.decoder = ByteLevel()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @classmethod
    def text(cls, ids: Sequence[int]) -> str:
        return "".join(cls.LETTERS[token_id] for token_id in ids)
