"""Stop strings through the engine, against the toy model's answers cut by hand."""

from __future__ import annotations

import pytest

from model_runner.request import FinishReason, GenerateRequest, SamplingParams, StopConditions
from tests.model_runner.engine_harness import Harness
from tests.model_runner.toy_model import ToyTokenizer, answer

TOKENS = 24
PROMPTS = [[number, 3, number + 1] for number in range(20)]
TEXTS = [ToyTokenizer.text(answer(prompt, TOKENS)) for prompt in PROMPTS]


def submit(harness: Harness, name: str, prompt: list[int], num_choices: int = 1, **stop: object) -> None:
    conditions = StopConditions(max_tokens=TOKENS, **stop)
    request = GenerateRequest(name, tuple(prompt), SamplingParams(), conditions, num_choices)
    harness.engine.submit(request)


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_three_tokens(include: bool) -> None:
    with Harness() as harness:
        for number, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
            stop = text[7:10]
            submit(harness, f"{number}", prompt, 2, stop_strings=("?", stop), include_stop_string=include)
        for number, text in enumerate(TEXTS):
            stop = text[7:10]
            start = text.index(stop)
            for choice in range(2):
                assert harness.text(f"{number}", choice) == text[: start + 3 * include]
                # Not a token is drawn beyond the one that completes it.
                assert len(harness.tokens(f"{number}", choice)) == start + 3
            last = harness.last(f"{number}")
            assert (last.finish_reason, last.stop_string, last.stop_token_id) == (FinishReason.STOP, stop, None)


def test_no_chunk_shows_a_part_of_it() -> None:
    with Harness() as harness:
        for number, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
            submit(harness, f"{number}", prompt, stop_strings=(text[4:20],))
        for number, text in enumerate(TEXTS):
            chunks = [chunk.text for chunk in harness.wait(f"{number}")]
            assert len(chunks) == 20
            assert "".join(chunks) == text[:4]


def test_before_min_tokens_no_stop_string_is_looked_for() -> None:
    with Harness() as harness:
        for number, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
            submit(harness, f"{number}", prompt, stop_strings=(text[2], text[9:11]), min_tokens=9)
        for number, text in enumerate(TEXTS):
            rest = text[9:]
            ends = [rest.find(stop) for stop in (text[2], text[9:11]) if stop in rest]
            assert harness.text(f"{number}") == text[:9] + rest[: min(ends)]
