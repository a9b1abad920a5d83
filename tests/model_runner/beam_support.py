"""Beam searches of an engine over the toy model: how they are submitted, and what they have delivered."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from model_runner.engine_types import Failure
from model_runner.request import (
    BeamSearch,
)
from model_runner.sequence import LiveRequest
from tests.model_runner.engine_harness import Harness
from tests.model_runner.naive_beams import Answer
from tests.model_runner.toy_model import VOCAB_SIZE


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def answers(harness: Harness, name: str) -> list[Answer]:
    """What a search has delivered: one chunk for each choice, best first."""
    chunks = harness.wait(name)
    assert not any(isinstance(chunk, Failure) for chunk in chunks), chunks
    assert [chunk.choice_index for chunk in chunks] == list(range(len(chunks)))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return [(chunk.score, chunk.token_ids) for chunk in chunks]


def assert_answers(harness: Harness, name: str, expected: list[Answer]) -> None:
    found = answers(harness, name)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in expected]
    # The engine adds up in float32.
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5, abs=1e-5)


def submit(
    harness: Harness, name: str, prompt: Sequence[int], width: int, limit: int | None, **options: Any
) -> LiveRequest:
    params = {key: options.pop(key) for key in ("length_penalty", "early_stopping") if key in options}
    options.setdefault("num_choices", width)
    return harness.submit(name, prompt, limit, beam_search=BeamSearch(width, **params), **options)
