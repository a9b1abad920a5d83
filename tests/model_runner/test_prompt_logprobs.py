"""Log-probabilities of prompts, beside those of the model without an engine, however the prompt is computed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvmanager.types import Append
from model_runner.attention import AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.config_hf import config_from_hf
from model_runner.executor import TorchExecutor
from model_runner.loading import LoadedModel
from model_runner.models.decoder import Decoder
from model_runner.request import Chunk, PositionLogprobs, SamplingParams
from model_runner.weights import SafetensorsWeights
from tests.model_runner.engine_harness import Harness
from tests.model_runner.native_support import INSTRUCTION_SETS
from tests.model_runner.toy_model import VOCAB_SIZE, answer, next_logits

CPU = torch.device("cpu")
BLOCK_SIZE = 4
DRAWN = SamplingParams(temperature=1.0, seed=3)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def assert_right(
    positions: Sequence[PositionLogprobs], prompt: Sequence[int], rows: Sequence[Tensor], top: int
) -> None:
    """rows: the logits after each token of the prompt but the last."""
    assert len(positions) == len(prompt) - 1
    for position, token, logits in zip(positions, prompt[1:], rows, strict=True):
        expected = logits.double().log_softmax(0)
        assert position.token_id == token
        assert position.logprob == pytest.approx(expected[token].item(), abs=1e-4)
        best = expected.topk(top).values.tolist()
        assert [value for _, value in position.top] == pytest.approx(best, abs=1e-4)
        assert [expected[token_id].item() for token_id, _ in position.top] == pytest.approx(best, abs=1e-4)


def toy_rows(prompt: Sequence[int]) -> list[Tensor]:
    return [next_logits(prompt[:length]) for length in range(1, len(prompt))]


def first_chunk(harness: Harness, name: str) -> Chunk:
    """The chunk that has them; no other has any."""
    first, *others = harness.wait(name)
    assert all(chunk.prompt_logprobs == () for chunk in others)
    return first


class TestOfTheToy:
    @pytest.mark.parametrize("chunk", [0, 1, 5])
    @pytest.mark.parametrize("length", [1, 2, 4, 13])
    def test_in_chunks(self, length: int, chunk: int) -> None:
        prompt = prompt_of(length)
        with Harness(prefill_chunk_tokens=chunk) as harness:
            harness.submit("a", prompt, 3, prompt_logprobs=2)
            assert_right(first_chunk(harness, "a").prompt_logprobs, prompt, toy_rows(prompt), 2)
            assert harness.tokens("a") == answer(prompt, 3)

    def test_a_cached_prompt_is_computed_again(self) -> None:
        prompt = prompt_of(14)
        with Harness() as harness:
            for name in ("cold", "warm"):
                harness.submit(name, prompt, 2, prompt_logprobs=0)
                assert_right(first_chunk(harness, name).prompt_logprobs, prompt, toy_rows(prompt), 0)
                assert harness.last(name).usage.cached_tokens == 0
            assert harness.executor.computed_tokens == 2 * (14 + 1)

    def test_choices_get_them_once(self) -> None:
        prompt = prompt_of(6)
        with Harness() as harness:
            harness.submit("a", prompt, 3, prompt_logprobs=1, num_choices=3, sampling=DRAWN, logprobs=0)
            first = first_chunk(harness, "a")
            assert first.choice_index == 0
            assert_right(first.prompt_logprobs, prompt, toy_rows(prompt), 1)
            assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in harness.wait("a"))
            for choice in range(3):
                assert harness.tokens("a", choice) == answer(prompt, 3, DRAWN, seed=3 + choice)

    def test_among_others_that_are_in_the_same_steps(self) -> None:
        prompts = {f"r{number}": prompt_of(5 + 3 * number, number) for number in range(8)}
        with Harness(max_batched_tokens=16) as harness:
            for number, (name, prompt) in enumerate(prompts.items()):
                harness.submit(name, prompt, 6, prompt_logprobs=3 if number % 2 else None)
            for number, (name, prompt) in enumerate(prompts.items()):
                assert harness.tokens(name) == answer(prompt, 6)
                positions = first_chunk(harness, name).prompt_logprobs
                if number % 2:
                    assert_right(positions, prompt, toy_rows(prompt), 3)
                else:
                    assert positions == ()

    @pytest.mark.usefixtures("no_foresight")
    def test_after_a_preemption_in_the_middle(self) -> None:
        """Meanwhile the whole prompt is found in the cache, and must not be read: its logits would be missing."""
        prompt = prompt_of(24)
        with Harness(num_blocks=17, prefill_chunk_tokens=4) as harness:

            def take_the_rest() -> None:
                table = harness.pool.allocate("other/0", prompt).block_ids
                for position, token in enumerate(prompt):
                    slot = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                    harness.executor.slots[slot] = token
                harness.pool.append([Append("other/0", (), len(prompt))])
                harness.pool.allocate("rest/0", [7] * (harness.pool.occupancy().free_blocks * BLOCK_SIZE))

            known: list[int] = []
            line = harness.engine._scheduler.waiting
            harness.executor.before_step |= {
                2: lambda: harness.submit("a", prompt, 4, prompt_logprobs=1),
                # Ours has computed 8 tokens; the older one will need its blocks before the prompt is complete.
                5: take_the_rest,
                9: lambda: known.append(len(next(iter(line)).live.prompt_logprobs)),
                15: lambda: harness.pool.free([Append("other/0"), Append("rest/0")]),
            }
            harness.submit("older", prompt_of(3, 1), 20)
            harness.wait("older")
            assert_right(first_chunk(harness, "a").prompt_logprobs, prompt, toy_rows(prompt), 1)
            assert harness.tokens("a") == answer(prompt, 4)
            assert 0 < known[0] < len(prompt) - 1

    def test_an_abort_before_the_first_token(self) -> None:
        with Harness(prefill_chunk_tokens=2) as harness:
            harness.executor.before_step[3] = lambda: harness.engine.abort(["a"])
            harness.submit("a", prompt_of(30), 4, prompt_logprobs=1)
            assert all(chunk.prompt_logprobs == () for chunk in harness.wait("a"))


def naive_rows(decoder: Decoder, token_ids: list[int]) -> Tensor:
    """Logits after each token, from one forward over all of them."""
    c = decoder.config
    shape = AttentionShape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 128, 2, torch.float32, CPU)
    batch = pack_batch([BatchEntry(token_ids, 0, [1], num_logits=len(token_ids))], 128, CPU)
    with torch.inference_mode():
        return decoder.forward(batch, create_backend("reference", shape))


def real_positions(smollm2: LoadedModel, prompt: list[int], chunk: int, other: list[int]) -> Sequence[PositionLogprobs]:
    """Those of the kernels, through the engine, beside another request when `other` is not empty."""
    c = smollm2.config
    shape = AttentionShape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 16, 33, torch.float32, CPU)
    executor = TorchExecutor(smollm2.model, create_backend("cpu", shape), 16, CPU)
    with Harness(
        num_blocks=33, block_size=16, executor=executor, tokenizer=smollm2.tokenizer, prefill_chunk_tokens=chunk
    ) as harness:
        if other:
            harness.submit("other", other, 8)
        harness.submit("a", prompt, 1, prompt_logprobs=5)
        positions = first_chunk(harness, "a").prompt_logprobs
        if other:
            harness.wait("other")
    return positions


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")
def test_of_a_real_model(
    smollm2: LoadedModel, smollm2_in_torch: LoadedModel, golden_smollm2: list[dict[str, Any]]
) -> None:
    """Beside one forward in plain torch, and what transformers gave its own outputs; the same bits in any chunks."""
    item = golden_smollm2[0]
    prompt = item["prompt_token_ids"] + item["output_ids"]
    positions = real_positions(smollm2, prompt, chunk=0, other=[])
    assert_right(positions, prompt, list(naive_rows(smollm2_in_torch.model, prompt)[:-1]), 5)
    outputs = positions[len(item["prompt_token_ids"]) - 1 :]
    assert [position.logprob for position in outputs] == pytest.approx(item["logprobs"], abs=1e-3)
    assert real_positions(smollm2, prompt, chunk=16, other=prompt[5:30]) == positions


def test_last_position_is_that_of_transformers(tiny_models: Path) -> None:
    """Hugging Face transformers wrote down the logits after some prompts; one more token reads them."""
    folder = tiny_models / "llama"
    config = config_from_hf(folder)
    model = Decoder(config, SafetensorsWeights(folder), torch.float32, CPU)
    shape = AttentionShape(
        config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim, 8, 33, torch.float32, CPU
    )
    executor = TorchExecutor(model, create_backend("reference", shape), 8, CPU)
    with Harness(num_blocks=33, block_size=8, executor=executor, prefill_chunk_tokens=6) as harness:
        for number, item in enumerate(json.loads((folder / "golden.json").read_text())):
            prompt = [*item["token_ids"], 11]
            harness.submit(str(number), prompt, 1, prompt_logprobs=4)
            positions = first_chunk(harness, str(number)).prompt_logprobs
            assert len(positions) == len(prompt) - 1
            assert_right(positions[-1:], prompt[-2:], [torch.tensor(item["logits"])], 4)
