"""Beam searches of SmolLM2 through the engine, against those that Hugging Face transformers recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model_runner.attention import AttentionShape, create_backend
from model_runner.executor import TorchExecutor
from model_runner.loading import LoadedModel
from model_runner.request import BeamSearch, EarlyStopping, FinishReason
from tests.model_runner.engine_harness import Harness

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "golden_beams.json").read_text())
PROMPTS, SEARCHES = GOLDEN["prompts"], GOLDEN["searches"]
WAYS = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.FIRST, "never": EarlyStopping.NEVER}
TOLERANCE = 1e-3
CPU = torch.device("cpu")


def harness_of(loaded: LoadedModel, num_blocks: int) -> Harness:
    c = loaded.config
    shape = AttentionShape(c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, 16, num_blocks, torch.float32, CPU)
    backend = create_backend("cpu", shape)
    executor = TorchExecutor(loaded.model, backend, 16, CPU)
    return Harness(executor=executor, tokenizer=loaded.tokenizer, num_blocks=num_blocks, block_size=16)


def submit(harness: Harness, name: str, run: dict[str, Any]) -> None:
    search = BeamSearch(run["width"], run["length_penalty"], WAYS[run["early_stopping"]])
    harness.submit(
        name,
        PROMPTS[run["prompt"]],
        run["max_new_tokens"],
        stop_token_ids=run["end_token_ids"],
        min_tokens=run["min_new_tokens"],
        num_choices=run["width"],
        beam_search=search,
    )


def assert_recorded(harness: Harness, name: str, run: dict[str, Any]) -> None:
    chunks = harness.wait(name)
    assert [list(chunk.token_ids) for chunk in chunks] == run["answers"], run
    for chunk, score in zip(chunks, run["scores"], strict=True):
        # Compared as sums of log-probabilities: a length penalty below 0 makes scores large.
        scale = len(chunk.token_ids) ** run["length_penalty"]
        assert chunk.score * scale == pytest.approx(score * scale, abs=TOLERANCE)
        is_stopped = chunk.token_ids[-1] in run["end_token_ids"]
        assert chunk.finish_reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)


@pytest.fixture(scope="module")
def side_by_side(smollm2: LoadedModel) -> Iterator[Harness]:
    """All in one batch, so that each search sees others begin and end beside it."""
    with harness_of(smollm2, num_blocks=600) as harness:
        for number, run in enumerate(SEARCHES):
            submit(harness, str(number), run)
        yield harness


@pytest.mark.parametrize("number", range(len(SEARCHES)))
def test_best_answers_and_scores(side_by_side: Harness, number: int) -> None:
    assert_recorded(side_by_side, str(number), SEARCHES[number])


def test_the_records_are_of_all_kinds() -> None:
    assert {(run["width"], run["early_stopping"]) for run in SEARCHES} == {(w, way) for w in (2, 4, 6) for way in WAYS}
    assert {run["length_penalty"] for run in SEARCHES} == {1.0, 0.0, 2.0, -1.0}
    lengths = {len(tokens) for run in SEARCHES for tokens in run["answers"]}
    assert min(lengths) < 8 < 20 == max(lengths)


@pytest.mark.usefixtures("no_foresight")
def test_in_a_pool_where_searches_are_preempted(smollm2: LoadedModel) -> None:
    runs = [run for run in SEARCHES if run["width"] == 4 and run["prompt"] in ("capital", "hello")]
    with harness_of(smollm2, num_blocks=14) as harness:
        for number, run in enumerate(runs):
            submit(harness, str(number), run)
        for number, run in enumerate(runs):
            assert_recorded(harness, str(number), run)
        assert sum(step.preemptions for step in harness.recorder.steps) > 0
