"""Hugging Face transformers: generate() in static batches of equal prompts. Runs in its own environment.

One by one (batch 1) it plays a part of A and B only, which would take minutes: its rate does not depend on how many.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from bench.serve.cpu import CpuMeter
from bench.serve.player import Answer
from bench.serve.system import Run
from bench.serve.workloads import Conversation, Workload, warm_up

ONE_BY_ONE: Mapping[str, int] = {"A": 8, "B": 4}
"""Requests of a workload that are played one by one, where not all."""


async def create(options: dict[str, Any]) -> HfSystem:
    """Options: model (a Hugging Face directory), batch."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    system = HfSystem(model, options["batch"])
    system.generate(warm_up().conversations, 0.0)
    return system


class HfSystem:
    """A model in float32."""

    def __init__(self, model: Any, batch: int) -> None:
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self._model, self._batch = model, batch

    async def run(self, workload: Workload) -> Run:
        played = workload.cut(ONE_BY_ONE.get(workload.name, 0) if self._batch == 1 else 0).conversations
        answers: list[Answer] = []
        with CpuMeter() as meter:
            start = perf_counter()
            for first in range(0, len(played), self._batch):
                answers += self.generate(played[first : first + self._batch], start)
        return Run(tuple(answers), meter.use)

    async def close(self) -> None:
        pass

    def generate(self, conversations: tuple[Conversation, ...], start: float) -> list[Answer]:
        """The answers to conversations of one turn each, whose lengths are the same."""
        turns = [each.turns[0] for each in conversations]
        prompts, times = torch.tensor([turn.prompt for turn in turns]), _Times(start)
        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=turns[0].max_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=times,
        )
        # All requests of these workloads come at once.
        return [Answer(0.0, tuple(times.times), tuple(row)) for row in output[:, prompts.shape[1] :].tolist()]


class _Times:
    """A streamer of transformers that notes when each token of the batch came."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._has_prompt = False
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.times.append(perf_counter() - self._start)
        self._has_prompt = True

    def end(self) -> None:
        pass
