"""Steps whose tokens stay on the device, on a lane that does no copy before it must: the answers of plain steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from model_runner.attention import AttentionShape, create_backend
from model_runner.config_hf import config_from_hf
from model_runner.executor import TorchExecutor
from model_runner.models.decoder import Decoder
from model_runner.request import Chunk, SamplingParams
from model_runner.sampling_flashinfer import FlashInferSampler
from model_runner.steps import Steps
from model_runner.stream_steps import StreamSteps
from model_runner.weights import SafetensorsWeights
from tests.model_runner import gpu_doubles
from tests.model_runner.attention_world import CPU
from tests.model_runner.engine_harness import Harness
from tests.model_runner.step_modes import StepMode, in_mode
from tests.model_runner.test_device_copies import SlowLane

PROMPTS = [[5, 9, 2, 7, 1, 3, 8, 8, 4], [5, 9, 2, 7, 1, 3, 8, 8, 6, 1, 2], [11], [40, 2, 9, 30]]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3, top_p=0.8),
    SamplingParams(temperature=0.7, seed=4, top_k=5),
    SamplingParams(temperature=1.3, seed=5, min_p=0.05, top_k=30, top_p=0.9),
]


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> Decoder:
    return tiny_llama(tiny_models, CPU)


def tiny_llama(tiny_models: Path, device: torch.device) -> Decoder:
    folder = tiny_models / "llama"
    return Decoder(config_from_hf(folder), SafetensorsWeights(folder), torch.float32, device)


Answers = dict[str, dict[int, list[Chunk]]]


def answers(
    model: Decoder,
    mode: StepMode,
    steps: Callable[[TorchExecutor], Steps] | None = None,
    device: torch.device = CPU,
    seedless: bool = False,
) -> Answers:
    """The chunks of a few requests by choice; the blocks are too few for all at a time. seedless: one more, "free"."""
    c = model.config
    shape = AttentionShape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 8, 14, torch.float32, device)
    executor = TorchExecutor(model, create_backend("reference", shape), 8, device)
    with in_mode(mode):
        harness = Harness(num_blocks=14, block_size=8, executor=executor, max_batched_tokens=8)
    if steps is not None:
        harness.engine._steps = harness.engine._flights._steps = steps(executor)
    told: Answers = {}
    with harness:
        for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
            harness.submit(f"r{number}", prompt, 20 + number, sampling=sampling, logprobs=[None, 0, 3, 1][number])
        harness.submit("several", PROMPTS[0], 9, sampling=SAMPLINGS[1], num_choices=3)
        harness.submit("ruled", PROMPTS[1], 9, sampling=SamplingParams(presence_penalty=1.0))
        names = ["r0", "r1", "r2", "r3", "several", "ruled"]
        if seedless:
            sampling = SamplingParams(temperature=1.5, top_p=0.9)
            harness.submit("free", PROMPTS[2], 30, sampling=sampling, ignore_eos=True)
            names.append("free")
        for name in names:
            for chunk in harness.wait(name):
                told.setdefault(name, {}).setdefault(chunk.choice_index, []).append(chunk)
    return told


def test_the_answers_are_those_of_plain_steps(model: Decoder) -> None:
    lane = SlowLane()
    plain = answers(model, StepMode.SYNC)
    streamed = answers(model, StepMode.AHEAD, lambda executor: StreamSteps(executor, lane))
    assert [len(chunks) for chunks in plain["r3"].values()] == [23]
    assert_alike(plain, streamed)
    assert lane.given > 100


def test_another_sampler_leaves_those_with_seeds_alone(model: Decoder) -> None:
    """The same request without a seed is drawn for by the sampler alone: with other numbers it is another answer."""
    plain = answers(model, StepMode.SYNC)
    free = []
    for start in (0, 1000):
        sampler = FlashInferSampler(gpu_doubles.flashinfer, iter(range(start, start + 1000)).__next__)
        steps = partial(StreamSteps, lane=SlowLane(), sampler=sampler)
        streamed = answers(model, StepMode.AHEAD, steps, seedless=True)
        assert_alike(plain, streamed)
        free.append([token for chunk in streamed["free"][0] for token in chunk.token_ids])
    assert [len(tokens) for tokens in free] == [30, 30]
    assert free[0] != free[1]


def assert_alike(plain: Answers, streamed: Answers) -> None:
    for name, choices in plain.items():
        assert choices.keys() == streamed[name].keys()
        for index, chunks in choices.items():
            for one, other in zip(chunks, streamed[name][index], strict=True):
                assert (one.token_ids, one.text, one.finish_reason) == (
                    other.token_ids,
                    other.text,
                    other.finish_reason,
                )
                assert len(one.logprobs) == len(other.logprobs)
                for position, same in zip(one.logprobs, other.logprobs, strict=True):
                    assert position.token_id == same.token_id
                    assert position.logprob == pytest.approx(same.logprob, abs=1e-4)
                    assert [token for token, _ in position.top] == [token for token, _ in same.top]
