"""SmolLM2 through paged attention, against outputs that another implementation recorded in float32."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.loading import LoadedModel

CPU = torch.device("cpu")
TOLERANCE = 1e-3
CLEAR_GAP = 0.02
"""Below this distance between the two best logits, either may win."""
WHOLE = 1 << 20


class Paged:
    """A backend whose blocks are dealt out in random order, all of them poisoned until they are written."""

    def __init__(self, loaded: LoadedModel, attention: str, block_size: int, prompts: list[list[int]]) -> None:
        counts = [-(-len(prompt) // block_size) for prompt in prompts]
        blocks = list(range(1, sum(counts) + 1))
        random.Random(block_size).shuffle(blocks)
        self.prompts = prompts
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.model = loaded.model
        self.backend = _backend(loaded, attention, block_size, sum(counts) + 1)
        self.backend.poison(range(sum(counts) + 1))

    def prefill(self, lengths: list[int], chunk: int = WHOLE) -> Tensor:
        """Computes so many tokens of each prompt side by side, `chunk` a step: the logits after the last of each."""
        logits = torch.empty(len(self.prompts), self.model.config.vocab_size)
        for first in range(0, max(lengths), chunk):
            spans = {
                index: (first, min(first + chunk, length)) for index, length in enumerate(lengths) if first < length
            }
            logits[list(spans)] = self.step(spans)
        return logits

    @torch.inference_mode()
    def step(self, spans: dict[int, tuple[int, int]]) -> Tensor:
        """One step with tokens `first` up to `last` of some prompts: the logits after each."""
        entries = [
            BatchEntry(self.prompts[index][first:last], first, self.tables[index], num_logits=1)
            for index, (first, last) in spans.items()
        ]
        return self.model.forward(pack_batch(entries, self.backend.shape.block_size, CPU), self.backend)


def _backend(loaded: LoadedModel, attention: str, block_size: int, num_blocks: int) -> AttentionBackend:
    c = loaded.config
    shape = AttentionShape(
        c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, block_size, num_blocks, torch.float32, CPU
    )
    return create_backend(attention, shape)


@pytest.fixture
def loaded(request: pytest.FixtureRequest, layers: str) -> LoadedModel:
    return request.getfixturevalue({"native": "smollm2", "torch": "smollm2_in_torch"}[layers])


@pytest.mark.parametrize(
    ("layers", "attention", "block_size", "chunk"),
    [
        ("native", "cpu", 16, WHOLE),
        ("native", "cpu", 8, 7),
        ("native", "cpu", 128, 7),
        ("native", "cpu", 256, WHOLE),
        ("native", "reference", 32, 7),
        ("torch", "cpu", 32, 29),
        ("torch", "cpu_torch", 16, WHOLE),
        ("torch", "cpu_torch", 8, 29),
        ("torch", "reference", 16, WHOLE),
        ("torch", "reference", 8, 29),
    ],
)
def test_first_logits_of_all_prompts_side_by_side(
    loaded: LoadedModel, golden_smollm2: list[dict[str, Any]], attention: str, block_size: int, chunk: int
) -> None:
    assert len(golden_smollm2) == 20
    prompts = [item["prompt_token_ids"] for item in golden_smollm2]
    logits = Paged(loaded, attention, block_size, prompts).prefill([len(prompt) for prompt in prompts], chunk)
    for item, ours in zip(golden_smollm2, logits, strict=True):
        recorded = item["first_logits"]
        expected = torch.tensor(recorded["logits"])
        torch.testing.assert_close(ours[recorded["ids"]], expected, atol=TOLERANCE, rtol=0)
        assert ours.logsumexp(dim=0).item() == pytest.approx(recorded["logsumexp"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("layers", "attention", "turns"), [("native", "cpu", 48), ("torch", "cpu_torch", 17), ("torch", "reference", 17)]
)
def test_greedy_tokens_when_the_recorded_ones_are_fed(
    loaded: LoadedModel, golden_smollm2: list[dict[str, Any]], attention: str, turns: int
) -> None:
    """All answers decode in one batch, at lengths of their own; each recorded token is fed, whatever ours was.

    Plain torch takes ten times as long, and each answer begins a block within 17 tokens.
    """
    prompts = [item["prompt_token_ids"] for item in golden_smollm2]
    paged = Paged(loaded, attention, 16, [item["prompt_token_ids"] + item["output_ids"] for item in golden_smollm2])
    logits = paged.prefill([len(prompt) for prompt in prompts])
    assert all(len(item["output_ids"]) == 48 for item in golden_smollm2)
    for turn in range(turns):
        for item, best in zip(golden_smollm2, logits.argmax(dim=1).tolist(), strict=True):
            assert best == item["output_ids"][turn] or item["gaps"][turn] <= CLEAR_GAP
        logits = paged.step({index: (len(ids) + turn, len(ids) + turn + 1) for index, ids in enumerate(prompts)})


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("layers", "attention"), [("native", "cpu"), ("torch", "cpu_torch"), ("torch", "reference")])
def test_a_prompt_that_reads_what_its_like_writes_in_the_same_step(
    loaded: LoadedModel, golden_smollm2: list[dict[str, Any]], attention: str, backwards: bool
) -> None:
    """The second of two equal prompts has the first's full blocks in its table, and computes the rest only."""
    item = max(golden_smollm2, key=lambda item: len(item["prompt_token_ids"]))
    prompt, block_size = item["prompt_token_ids"], 16
    full = (len(prompt) - 1) // block_size
    assert full > 1
    paged = Paged(loaded, attention, block_size, [prompt, prompt])
    paged.tables[1][:full] = paged.tables[0][:full]
    spans = {0: (0, len(prompt)), 1: (full * block_size, len(prompt))}
    recorded = item["first_logits"]
    for logits in paged.step(dict(reversed(spans.items())) if backwards else spans):
        expected = torch.tensor(recorded["logits"])
        torch.testing.assert_close(logits[recorded["ids"]], expected, atol=TOLERANCE, rtol=0)


def test_prompts_become_the_recorded_tokens(smollm2: LoadedModel, golden_smollm2: list[dict[str, Any]]) -> None:
    for item in golden_smollm2:
        assert smollm2.tokenizer.encode(item["prompt"]) == item["prompt_token_ids"]
        if "messages" in item:
            assert smollm2.tokenizer.render_chat(item["messages"]) == item["prompt"]
