"""The engine's chunks as answers of vllm.grpc.engine, as its proto says: deltas, and a Complete for each choice."""

from __future__ import annotations

from typing import Any

import pytest

from model_runner.request import (
    Chunk,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    StopConditions,
    Usage,
)
from tests.gateway.needed import need

need("smg_grpc_proto")

from services.vllm_answer import VllmAnswer  # noqa: E402

STOP = StopConditions(stop_token_ids=frozenset({9}))
REQUEST = GenerateRequest("r", (5, 6, 7), stop=STOP, num_choices=2)
USAGE = Usage(3, 2, 4, 0, 0.0, 0.0, 0.0, drafted_tokens=6, accepted_tokens=5)


def chunk(index: int, *token_ids: int, **more: Any) -> Chunk:
    return Chunk("r", index, token_ids, "", **more)


def kinds(answers: list[Any]) -> list[str]:
    return [answer.WhichOneof("response") for answer in answers]


def test_a_stream_has_new_tokens_only() -> None:
    answer = VllmAnswer(REQUEST, streams=True)
    (first,) = answer.write(chunk(0, 1, 2), USAGE)
    (second,) = answer.write(chunk(0, 3), USAGE)
    assert (list(first.chunk.token_ids), list(second.chunk.token_ids)) == ([1, 2], [3])
    assert (first.chunk.completion_tokens, second.chunk.completion_tokens) == (2, 1)
    assert (first.chunk.prompt_tokens, first.chunk.cached_tokens) == (3, 2)


def test_each_choice_of_a_stream_ends_with_a_complete_that_counts_all_of_it() -> None:
    answer = VllmAnswer(REQUEST, streams=True)
    answer.write(chunk(0, 1), USAGE)
    answer.write(chunk(1, 4), USAGE)
    ended = answer.write(chunk(1, 5, finish_reason=FinishReason.LENGTH), USAGE)
    assert kinds(ended) == ["chunk", "complete"]
    complete = ended[1].complete
    assert (complete.index, complete.finish_reason, complete.completion_tokens) == (1, "length", 2)
    assert (complete.prompt_tokens, complete.cached_tokens) == (3, 2)
    assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (6, 5)
    assert list(complete.output_ids) == []
    (last,) = answer.write(chunk(0, finish_reason=FinishReason.ABORT), USAGE)
    assert (last.complete.index, last.complete.finish_reason, last.complete.completion_tokens) == (0, "abort", 1)


def test_without_a_stream_a_choice_is_one_complete() -> None:
    answer = VllmAnswer(REQUEST, streams=False)
    positions = [PositionLogprobs(token, -token / 2) for token in (1, 2)]
    assert answer.write(chunk(1, 1, logprobs=(positions[0],)), USAGE) == []
    (ended,) = answer.write(chunk(1, 2, logprobs=(positions[1],), finish_reason=FinishReason.STOP), USAGE)
    complete = ended.complete
    assert (list(complete.output_ids), complete.index, complete.finish_reason) == ([1, 2], 1, "stop")
    assert list(complete.output_logprobs.token_ids) == [1, 2]
    assert list(complete.output_logprobs.token_logprobs) == [-0.5, -1.0]


@pytest.mark.parametrize(
    ("cause", "matched"),
    [
        ({"stop_token_id": 9}, ("matched_token_id", 9)),
        # vLLM's stop_reason is None where the model's own end token came.
        ({"stop_token_id": 2}, (None, None)),
        ({"stop_string": "END"}, ("matched_stop_str", "END")),
    ],
)
def test_what_matched(cause: dict[str, Any], matched: tuple[str | None, Any]) -> None:
    (ended,) = VllmAnswer(REQUEST, streams=False).write(chunk(0, finish_reason=FinishReason.STOP, **cause), USAGE)
    which = ended.complete.WhichOneof("matched_stop")
    assert (which, getattr(ended.complete, which) if which else None) == matched


def test_log_probabilities_of_a_delta_are_its_own() -> None:
    answer = VllmAnswer(REQUEST, streams=True)
    position = PositionLogprobs(1, -0.25, ((1, -0.25), (8, -2.5)))
    (first,) = answer.write(chunk(0, 1, logprobs=(position,)), USAGE)
    assert list(first.chunk.output_logprobs.token_logprobs) == [-0.25]
    (top,) = first.chunk.output_logprobs.top_logprobs
    assert (list(top.token_ids), list(top.values)) == ([1, 8], [-0.25, -2.5])
    (plain,) = answer.write(chunk(0, 2), USAGE)
    assert not plain.chunk.HasField("output_logprobs")


def test_the_prompt_s_log_probabilities_are_in_each_choice_s_first_chunk() -> None:
    answer = VllmAnswer(REQUEST, streams=True)
    prompt = (PositionLogprobs(6, -1.0, ((6, -1.0),)), PositionLogprobs(7, -2.0, ((3, -0.5),)))
    (first,) = answer.write(chunk(0, 1, prompt_logprobs=prompt), USAGE)
    (other,) = answer.write(chunk(1, 1), USAGE)
    (later,) = answer.write(chunk(0, 2), USAGE)
    told = first.chunk.input_logprobs
    # "First prompt token has no logprob."
    assert [each.HasField("value") for each in told.token_logprobs] == [False, True, True]
    assert [each.value for each in told.token_logprobs[1:]] == [-1.0, -2.0]
    assert list(told.token_ids) == [5, 6, 7]
    assert [list(each.token_ids) for each in told.top_logprobs] == [[], [6], [3]]
    assert other.chunk.input_logprobs == told
    assert not later.chunk.HasField("input_logprobs")
