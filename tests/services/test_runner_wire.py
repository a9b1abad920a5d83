"""A request on its way to the engine, and the engine's failures on their way back."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.engine_types import Failure, FailureKind
from model_runner.request import (
    NO_RETENTION,
    BeamSearch,
    Chunk,
    EarlyStopping,
    PositionLogprobs,
    Retention,
    SamplingParams,
)
from services.client_request import generate_request
from services.errors import to_status
from services.runner_errors import runner_failure
from services.runner_wire import field_path, read_chunk, read_request, write_chunk
from services.streams import Stream


def test_what_is_to_be_kept_arrives() -> None:
    message = generate_request([1], priority=7, pin_seconds=0.5, cache_salt="s")
    assert read_request(message, "r", [1]).retention == Retention(7, 0.5)
    assert read_request(generate_request([1], pin_seconds=60), "r", [1]).retention == Retention(0, 60.0)
    assert field_path(message, "pin_seconds") == "retention.pin_seconds"


def test_the_priority_in_line_is_not_that_of_what_is_cached() -> None:
    message = generate_request([1], priority=7, queue_priority=-3)
    request = read_request(message, "r", [1])
    assert (message.priority, request.queue_priority, request.retention.priority) == (-3, -3, 7)
    assert field_path(message, "queue_priority") == "priority"
    assert field_path(message, "priority") == "retention.priority"


def test_rules_of_sampling_arrive() -> None:
    message = generate_request(
        [1],
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={7: 2.0, 3: -1.5},
        allowed_token_ids=[9, 4, 9],
        bad_words=["no"],
        min_tokens=4,
        prompt_logprobs=0,
    )
    request = read_request(message, "r", [1], ((5, 6),))
    assert request.sampling == SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias=((3, -1.5), (7, 2.0)),
        allowed_token_ids=frozenset({4, 9}),
        bad_words=((5, 6),),
    )
    assert (request.stop.min_tokens, request.prompt_logprobs) == (4, 0)
    assert list(message.sampling.bad_words) == ["no"]
    assert read_request(generate_request([1]), "r", [1]).prompt_logprobs is None
    assert read_request(generate_request([1], allowed_token_ids=[]), "r", [1]).sampling.allowed_token_ids == frozenset()


def test_log_probabilities_of_the_prompt_arrive() -> None:
    positions = (PositionLogprobs(4, -0.5, ((9, -0.25), (4, -0.5))), PositionLogprobs(2, -8.0))
    chunk = Chunk("r", 0, (1,), "a", prompt_logprobs=positions)
    assert read_chunk(write_chunk(chunk)) == chunk


def test_what_is_not_asked_for_is_not_sent() -> None:
    message = generate_request([1], cache_salt="s")
    assert not message.HasField("retention")
    assert read_request(message, "r", [1]).retention == NO_RETENTION


def test_a_beam_search_arrives() -> None:
    plain = read_request(generate_request([1], beam_width=4), "r", [1])
    assert (plain.beam_search, plain.num_choices, plain.best_of) == (BeamSearch(4), 1, 0)
    for word, way in {"first": EarlyStopping.FIRST, "never": EarlyStopping.NEVER}.items():
        message = generate_request([1], beam_width=3, n=2, length_penalty=0.0, early_stopping=word)
        request = read_request(message, "r", [1])
        assert (request.beam_search, request.num_choices) == (BeamSearch(3, 0.0, way), 2)
    assert field_path(message, "width") == "beam_search.width"
    assert field_path(message, "length_penalty") == "beam_search.length_penalty"
    assert read_request(generate_request([1], n=2, best_of=5), "r", [1]).best_of == 5
    assert read_request(generate_request([1]), "r", [1]).beam_search is None


@pytest.mark.parametrize(
    "options", [{"early_stopping": "first"}, {"length_penalty": 1.0}, {"beam_width": 2, "early_stopping": "soon"}]
)
def test_what_makes_no_beam_search(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"early_stopping|length_penalty"):
        generate_request([1], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("score", [None, -0.5, 0.0])
def test_a_score_comes_back(score: float | None) -> None:
    assert read_chunk(write_chunk(Chunk("r", 1, (3,), "x", score=score))).score == score


@pytest.mark.parametrize("options", [{"priority": 2**31}, {"priority": 0.5}, {"pin_seconds": "long"}])
def test_what_no_message_can_carry(options: dict[str, object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        generate_request([1], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "code", "reason"),
    [
        (FailureKind.ENGINE, grpc.StatusCode.INTERNAL, "ENGINE_FAILED"),
        (FailureKind.ELSEWHERE, grpc.StatusCode.UNAVAILABLE, "NOT_READY"),
        (FailureKind.NAME_TAKEN, grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST"),
        (FailureKind.STOPPING, grpc.StatusCode.UNAVAILABLE, "STOPPING"),
        (FailureKind.REQUEST, grpc.StatusCode.INVALID_ARGUMENT, "REFUSED_BY_KV_MANAGER"),
        (FailureKind.PINS_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED, "PINS_EXHAUSTED"),
        (FailureKind.FORM, grpc.StatusCode.INVALID_ARGUMENT, "FORM_STUCK"),
    ],
)
def test_each_failure_has_a_status_and_a_reason(kind: FailureKind, code: grpc.StatusCode, reason: str) -> None:
    async def raised() -> Exception:
        stream = Stream("r")
        stream.put(Failure("r", "It is so.", kind))
        assert stream.ended
        with pytest.raises(Exception, match="It is so") as caught:
            async for _ in stream:
                pass
        return caught.value

    failure = runner_failure(asyncio.run(raised()))
    assert failure is not None
    assert (failure.code, failure.sentence, failure.reason) == (code, "It is so.", reason)
    info = error_details_pb2.ErrorInfo()
    assert to_status(failure).details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, pb.DESCRIPTOR.package)


def test_every_kind_of_failure_has_a_status() -> None:
    parametrized = test_each_failure_has_a_status_and_a_reason.pytestmark[0].args[1]
    assert {kind for kind, _, _ in parametrized} == set(FailureKind)
