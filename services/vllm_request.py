"""Requests of vllm.grpc.engine as the engine takes them; what vLLM takes an absent field for is said here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from model_runner.invalid import InvalidRequest
from model_runner.request import (
    MAX_REQUEST_ID_BYTES,
    GenerateRequest,
    SamplingParams,
    StopConditions,
    StructuredOutput,
    StructureKind,
)
from model_runner.validation import Limits, validate
from services.runner_errors import Unsupported

_DEFAULT_TEMPERATURE = 1.0
_SEEDS = 1 << 64

_FORMS = {
    "json_schema": StructureKind.JSON_SCHEMA,
    "regex": StructureKind.REGEX,
    "grammar": StructureKind.GRAMMAR,
}

_FIELDS = {
    "stop_strings": "stop",
    "include_stop_string": "include_stop_str_in_output",
    "num_choices": "n",
    "structured_output.choices": "choice",
}
"""Fields of the engine's request that have another name in SamplingParams."""


def engine_request_id(request_id: str) -> str:
    """The id that the engine knows a request by: its own, or a digest of one that is too long or not printable."""
    if len(request_id.encode(errors="surrogatepass")) <= MAX_REQUEST_ID_BYTES and request_id.isprintable():
        return request_id
    return hashlib.sha256(request_id.encode(errors="surrogatepass")).hexdigest()


def check_supported(message: pb.GenerateRequest) -> None:
    """Refuses what this engine does not have. Raises Unsupported and InvalidRequest."""
    if message.HasField("mm_inputs") or message.extra_mm_inputs or message.HasField("media_refs"):
        raise Unsupported("This model takes text only; leave mm_inputs, extra_mm_inputs and media_refs out.")
    if message.HasField("kv_transfer_params") or message.kv_transfer_params_json:
        raise Unsupported("K/V is not transferred between servers here; leave kv_transfer_params out.")
    if message.sampling_params.WhichOneof("constraint") == "structural_tag":
        raise Unsupported("There are no structural tags here; give a json_schema, a regex or a grammar.")
    if message.data_parallel_rank:
        raise InvalidRequest(
            "data_parallel_rank",
            f"data_parallel_rank is {message.data_parallel_rank}, and this server has one; leave it out.",
        )


def truncated(message: pb.GenerateRequest, token_ids: Sequence[int], limits: Limits) -> Sequence[int]:
    """The end of a prompt that is to be cut to its last tokens; -1: to what leaves room for the answer.

    Raises InvalidRequest.
    """
    params = message.sampling_params
    if not params.HasField("truncate_prompt_tokens"):
        return token_ids
    wanted = params.truncate_prompt_tokens
    if wanted == 0 or wanted < -1:
        raise InvalidRequest(
            "sampling_params.truncate_prompt_tokens",
            f"truncate_prompt_tokens is {wanted}; use 1 or more, or -1 for as many as leave room for the answer.",
        )
    if wanted == -1:
        # The last token of an answer needs no K/V.
        wanted = max(1, limits.max_sequence_tokens + 1 - max(1, params.max_tokens))
    return token_ids[-wanted:]


def read_vllm_request(message: pb.GenerateRequest, prompt_token_ids: Sequence[int], limits: Limits) -> GenerateRequest:
    """A validated request. Raises InvalidRequest with the field's path in the message."""
    params = message.sampling_params
    request = GenerateRequest(
        request_id=engine_request_id(message.request_id),
        prompt_token_ids=tuple(truncated(message, prompt_token_ids, limits)),
        sampling=_sampling(params),
        stop=StopConditions(
            max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
            stop_strings=tuple(params.stop),
            stop_token_ids=frozenset(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            include_stop_string=params.include_stop_str_in_output,
        ),
        num_choices=params.n or 1,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        structured_output=_structure(params),
    )
    try:
        validate(request, limits)
    except InvalidRequest as error:
        raise InvalidRequest(_path(message, error.field), str(error)) from None
    return request


def _sampling(params: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else _DEFAULT_TEMPERATURE,
        top_k=params.top_k,
        # These have no presence: 0, which could not be meant, is what is absent.
        top_p=params.top_p or 1.0,
        min_p=params.min_p,
        # Of negative seeds there are as many as of others.
        seed=params.seed % _SEEDS if params.HasField("seed") else None,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(sorted(params.logit_bias.items())),
    )


def _structure(params: pb.SamplingParams) -> StructuredOutput | None:
    match params.WhichOneof("constraint"):
        case "json_object" if params.json_object:
            return StructuredOutput(StructureKind.JSON_OBJECT)
        case "choice":
            return StructuredOutput(StructureKind.CHOICES, tuple(params.choice.choices))
        case form if form in _FORMS:
            return StructuredOutput(_FORMS[form], (getattr(params, form),))
        case _:
            return None


def _path(message: pb.GenerateRequest, field: str) -> str:
    if field == "prompt_token_ids":
        return "text" if message.WhichOneof("input") == "text" else "tokenized.input_ids"
    if field == "request_id":
        return field
    return f"sampling_params.{_FIELDS.get(field, field.removeprefix('structured_output.'))}"
