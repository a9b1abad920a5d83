"""The bench of sampling on a toy: all ways are timed on the same draws, and which steps count."""

from __future__ import annotations

import torch

from bench.sampling import CASES, ROWS, Phases, draws
from model_runner.observer import PhaseSeconds, StepReport


def test_ways_make_the_same_draws_with_and_without_penalties() -> None:
    logits = torch.randn(ROWS, 100, generator=torch.Generator().manual_seed(0))
    prompts = [[row, row + 1, 7] for row in range(ROWS)]
    for params in CASES.values():
        numpy, torchs = (draws(logits, prompts, params)[way](0) for way in ("numpy", "torch"))
        assert torch.equal(numpy, torchs)


def test_only_decode_steps_of_all_streams_count() -> None:
    phases = Phases()
    took = PhaseSeconds(schedule=1.0, kv=0.0, forward=6.0, sample=2.0, deliver=1.0)
    for sequences, prefill_tokens in ((ROWS, 0), (ROWS, 3), (ROWS - 1, 0), (ROWS, 0)):
        phases.on_step(StepReport(took, prefill_tokens, sequences, 0, sequences))
    assert phases.steps == 2
    assert phases.seconds["forward"] == 12.0
    assert sum(phases.seconds.values()) == 20.0
