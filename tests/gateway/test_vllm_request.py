"""Requests of vllm.grpc.engine as the engine takes them: what its proto and vLLM's SamplingParams say of each field."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from model_runner.invalid import InvalidRequest
from model_runner.request import StructuredOutput, StructureKind
from model_runner.validation import Limits
from services.runner_errors import Unsupported
from tests.gateway.needed import need

need("smg_grpc_proto")

from smg_grpc_proto.generated import vllm_engine_pb2 as pb  # noqa: E402

from services.vllm_request import check_supported, engine_request_id, read_vllm_request  # noqa: E402

LIMITS = Limits(vocab_size=1000, max_sequence_tokens=100)
PROMPT = [5, 6, 7]


def request(**sampling: Any) -> Any:
    tokenized = pb.TokenizedInput(input_ids=PROMPT)
    return pb.GenerateRequest(request_id="r", tokenized=tokenized, sampling_params=pb.SamplingParams(**sampling))


def read(message: Any, prompt: list[int] = PROMPT) -> Any:
    return read_vllm_request(message, prompt, LIMITS)


def test_what_is_absent_is_what_vllm_takes_it_for() -> None:
    # vllm.SamplingParams(): temperature 1.0, top_p 1.0, top_k 0, min_p 0.0, repetition_penalty 1.0, n 1, seed None.
    parsed = read(request())
    sampling = parsed.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (sampling.seed, sampling.logit_bias, parsed.num_choices) == (None, (), 1)
    assert (parsed.stop.max_tokens, parsed.stop.min_tokens, parsed.stop.ignore_eos) == (None, 0, False)
    assert (parsed.logprobs, parsed.prompt_logprobs, parsed.structured_output) == (None, None, None)
    assert parsed.prompt_token_ids == (5, 6, 7)


def test_temperature_0_is_not_an_absent_one() -> None:
    assert read(request(temperature=0.0)).sampling.temperature == 0.0


def test_every_sampling_field_arrives() -> None:
    parsed = read(
        request(
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            min_p=0.125,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            repetition_penalty=1.5,
            max_tokens=12,
            min_tokens=3,
            stop=["END", "\n"],
            stop_token_ids=[9, 8],
            ignore_eos=True,
            n=2,
            logprobs=0,
            prompt_logprobs=4,
            seed=7,
            include_stop_str_in_output=True,
            logit_bias={3: -100.0, 2: 1.5},
        )
    )
    sampling, stop = parsed.sampling, parsed.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 40, 0.125)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (sampling.seed, sampling.logit_bias) == (7, ((2, 1.5), (3, -100.0)))
    assert (stop.max_tokens, stop.min_tokens, stop.stop_strings) == (12, 3, ("END", "\n"))
    assert (stop.stop_token_ids, stop.ignore_eos, stop.include_stop_string) == (frozenset({8, 9}), True, True)
    assert (parsed.num_choices, parsed.logprobs, parsed.prompt_logprobs) == (2, 0, 4)


def test_a_negative_seed_is_a_seed() -> None:
    # int32 -1 as an unsigned number of 64 bits.
    assert read(request(seed=-1)).sampling.seed == 18446744073709551615


@pytest.mark.parametrize(
    ("sampling", "form"),
    [
        ({"json_schema": '{"type": "object"}'}, StructuredOutput(StructureKind.JSON_SCHEMA, ('{"type": "object"}',))),
        ({"regex": "[a-z]+"}, StructuredOutput(StructureKind.REGEX, ("[a-z]+",))),
        ({"grammar": 'start: "a"'}, StructuredOutput(StructureKind.GRAMMAR, ('start: "a"',))),
        ({"json_object": True}, StructuredOutput(StructureKind.JSON_OBJECT)),
        ({"json_object": False}, None),
        (
            {"choice": pb.ChoiceConstraint(choices=["yes", "no"])},
            StructuredOutput(StructureKind.CHOICES, ("yes", "no")),
        ),
    ],
)
def test_constraints(sampling: dict[str, Any], form: StructuredOutput | None) -> None:
    assert read(request(**sampling)).structured_output == form


@pytest.mark.parametrize(("wanted", "kept"), [(2, (6, 7)), (3, (5, 6, 7)), (50, (5, 6, 7))])
def test_a_prompt_is_cut_to_its_last_tokens(wanted: int, kept: tuple[int, ...]) -> None:
    assert read(request(truncate_prompt_tokens=wanted)).prompt_token_ids == kept


def test_a_prompt_is_cut_to_what_leaves_room() -> None:
    # 100 tokens of K/V and an answer of 11, whose last token needs none: 90 of the prompt.
    cut = read(request(truncate_prompt_tokens=-1, max_tokens=11), list(range(120)))
    assert cut.prompt_token_ids == tuple(range(30, 120))


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"truncate_prompt_tokens": 0}, "sampling_params.truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "sampling_params.truncate_prompt_tokens"),
        ({"temperature": -1.0}, "sampling_params.temperature"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"stop": [""]}, "sampling_params.stop"),
        ({"n": 65}, "sampling_params.n"),
        ({"logprobs": -1}, "sampling_params.logprobs"),
        ({"logit_bias": {1000: 1.0}}, "sampling_params.logit_bias"),
        ({"choice": pb.ChoiceConstraint()}, "sampling_params.choice"),
    ],
)
def test_what_cannot_be_names_the_field_of_this_contract(sampling: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(request(**sampling))
    assert refused.value.field == field


def test_a_prompt_that_cannot_be_names_where_it_came_from() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(request(), [1000])
    assert refused.value.field == "tokenized.input_ids"
    with pytest.raises(InvalidRequest) as refused:
        read(pb.GenerateRequest(request_id="r", text="x"), [1000])
    assert refused.value.field == "text"


@pytest.mark.parametrize(
    "message",
    [
        pb.GenerateRequest(mm_inputs=pb.MultimodalInputs()),
        pb.GenerateRequest(extra_mm_inputs=[pb.MultimodalInputs()]),
        pb.GenerateRequest(media_refs=pb.MediaRefs()),
        pb.GenerateRequest(kv_transfer_params=pb.KvTransferParams(remote_host="h")),
        pb.GenerateRequest(kv_transfer_params_json="{}"),
        pb.GenerateRequest(sampling_params=pb.SamplingParams(structural_tag="{}")),
    ],
)
def test_what_this_engine_does_not_have_is_refused(message: Any) -> None:
    with pytest.raises(Unsupported, match=r"; (leave|give) "):
        check_supported(message)


def test_only_the_one_rank_can_be_asked_for() -> None:
    check_supported(pb.GenerateRequest(data_parallel_rank=0))
    with pytest.raises(InvalidRequest, match="data_parallel_rank is 1"):
        check_supported(pb.GenerateRequest(data_parallel_rank=1))


def test_ids_that_the_engine_would_refuse_become_digests() -> None:
    assert engine_request_id("chatcmpl-1") == "chatcmpl-1"
    assert engine_request_id("x" * 128) == "x" * 128
    assert engine_request_id("x" * 129) == hashlib.sha256(b"x" * 129).hexdigest()
    assert engine_request_id("a\nb") == hashlib.sha256(b"a\nb").hexdigest()
