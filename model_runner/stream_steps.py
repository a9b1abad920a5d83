"""Steps on a GPU: all of a step is given to its stream at once, and what it draws stays there for the next step.

The host waits for nothing but the drawn tokens of a step, while the next one is in the stream already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_runner.device_copies import Download, Downloads, Lane, Uploads, to_device
from model_runner.draws import Drawn, Draws
from model_runner.executor import TorchExecutor, current
from model_runner.sampling import sample_ahead
from model_runner.sampling_device import MeasuredRows, Sampler, measure, positions_of
from model_runner.sampling_rows import NO_TOKEN
from model_runner.steps import Launched, StepOrder, StepResult


class StreamSteps:
    """A model_runner.steps.Steps. What fails while a step is launched is raised at once."""

    def __init__(self, executor: TorchExecutor, lane: Lane, sampler: Sampler | None = None) -> None:
        """sampler: draws for the rows that it takes."""
        self._executor = executor
        self._sampler = sampler
        self._uploads = Uploads(lane, executor.device)
        self._downloads = Downloads(lane)

    @torch.inference_mode()
    def launch(self, order: StepOrder, before: Launched | None) -> Launched:
        tokens = before.tokens if isinstance(before, _StreamStep) else None
        with current(self._executor.device):
            logits = self._executor.follow(order.entries, order.copies, tokens, self._uploads.send)
            if order.draws is None:
                return _StreamStep(logits, None, None)
            return self._drawn(logits, order.draws)

    def close(self) -> None:
        pass

    def _drawn(self, logits: Tensor, draws: Draws) -> _StreamStep:
        tokens = sample_ahead(logits, draws.rows, draws.source, self._sampler)
        asked = [number for number, count in enumerate(draws.top_n) if count is not None]
        counts = [draws.top_n[number] or 0 for number in asked]
        fetched = [tokens]
        if asked:
            # Not by the buffers in turn: the next step would wait for this copy, and so for all of this step before it.
            rows = to_device(torch.tensor([draws.source[number] for number in asked]), logits.device)
            numbers = to_device(torch.tensor(asked), logits.device)
            measured = measure(logits[rows], tokens[numbers].clamp(min=0), max(counts))
            fetched += measured.tensors
        return _StreamStep(logits, tokens, _Fetched(self._downloads.fetch(fetched), asked, counts))


@dataclass(frozen=True, slots=True)
class _Fetched:
    """What a step drew, on its way: the tokens, and measures of the rows of those draws that are asked about."""

    download: Download
    asked: list[int]
    counts: list[int]

    def take(self) -> Drawn:
        tokens, *measures = self.download.take()
        token_ids = tokens.tolist()
        positions = [None] * len(token_ids)
        if self.asked:
            chosen = [token_ids[number] for number in self.asked]
            told = positions_of(chosen, MeasuredRows(*measures), self.counts)
            by_number = dict(zip(self.asked, told, strict=True))
            return Drawn(
                token_ids,
                [None if token == NO_TOKEN else by_number.get(number) for number, token in enumerate(token_ids)],
            )
        return Drawn(token_ids, list(positions))


class _StreamStep:
    """A step in the stream. tokens: those that it draws, int64 [R], on the device."""

    def __init__(self, logits: Tensor, tokens: Tensor | None, fetched: _Fetched | None) -> None:
        self.tokens = tokens
        self._logits = logits
        self._fetched = fetched

    def wait(self) -> StepResult:
        # Who draws from the logits gives that work to the same stream.
        return StepResult(self._logits, None if self._fetched is None else self._fetched.take())
