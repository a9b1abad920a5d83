"""The model runner's messages to and from the engine's dataclasses; nothing is decided here."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.request import (
    BeamSearch,
    Chunk,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    PositionLogprobs,
    RequestView,
    Retention,
    SamplingParams,
    StopConditions,
    StructuredOutput,
    StructureKind,
    Usage,
)

_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}
_REASONS_BACK = {value: reason for reason, value in _REASONS.items()}
_EARLY_STOPPING = {
    pb.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.HEURISTIC,
    pb.EARLY_STOPPING_FIRST: EarlyStopping.FIRST,
    pb.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}
_NANOS = 1_000_000_000


FIELD_PATHS = {
    "prompt_token_ids": "token_ids.ids",
    **{name: f"sampling.{name}" for name in SamplingParams.__slots__},
    **{name: f"stop.{name}" for name in StopConditions.__slots__},
    **{name: f"retention.{name}" for name in Retention.__slots__},
    **{name: f"beam_search.{name}" for name in BeamSearch.__slots__},
    "queue_priority": "priority",
}
"""Where a field of the engine's request stands in the message, when it is not at the top under its own name."""


def field_path(message: pb.GenerateRequest, field: str) -> str:
    """The path of the message's field that `field` of a GenerateRequest came from."""
    if field == "prompt_token_ids" and message.WhichOneof("prompt") in ("text", "chat"):
        return str(message.WhichOneof("prompt"))
    return FIELD_PATHS.get(field, field)


def read_request(
    message: pb.GenerateRequest,
    request_id: str,
    prompt_token_ids: Sequence[int],
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> GenerateRequest:
    """A request as the engine knows it; values are taken as they are, for validation to judge.

    bad_words: the tokens of the message's own.
    """
    sampling, stop = message.sampling, message.stop
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
            min_p=sampling.min_p,
            seed=sampling.seed if sampling.HasField("seed") else None,
            repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=tuple(sorted(sampling.logit_bias.items())),
            allowed_token_ids=(
                frozenset(sampling.allowed_token_ids.ids) if sampling.HasField("allowed_token_ids") else None
            ),
            bad_words=bad_words,
        ),
        stop=StopConditions(
            max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
            stop_strings=tuple(stop.stop_strings),
            stop_token_ids=frozenset(stop.stop_token_ids),
            ignore_eos=stop.ignore_eos,
            min_tokens=stop.min_tokens,
            include_stop_string=stop.include_stop_string,
        ),
        num_choices=message.num_choices or 1,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        skip_cache_read=message.skip_cache_read,
        cache_salt=message.cache_salt,
        retention=Retention(message.retention.priority, message.retention.pin_seconds),
        queue_priority=message.priority,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        best_of=message.best_of,
        beam_search=_read_beam_search(message.beam_search) if message.HasField("beam_search") else None,
        structured_output=_read_structure(message.structured_output),
        skip_cache_write=message.skip_cache_write,
        tenant=message.tenant,
    )


def write_chunk(chunk: Chunk) -> pb.GenerateResponse:
    """A chunk as it goes on the wire."""
    message = pb.GenerateResponse(
        request_id=chunk.request_id,
        choice_index=chunk.choice_index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=[_write_logprobs(position) for position in chunk.logprobs],
        prompt_logprobs=[_write_logprobs(position) for position in chunk.prompt_logprobs],
        score=chunk.score,
    )
    if chunk.finish_reason is not None:
        message.finish_reason = _REASONS[chunk.finish_reason]
    if chunk.stop_token_id is not None:
        message.stop_token_id = chunk.stop_token_id
    if chunk.stop_string is not None:
        message.stop_string = chunk.stop_string
    if chunk.usage is not None:
        message.usage.CopyFrom(_write_usage(chunk.usage))
    return message


def read_chunk(message: pb.GenerateResponse) -> Chunk:
    """A chunk as a client's program sees it."""
    cause = message.WhichOneof("stop_cause")
    return Chunk(
        request_id=message.request_id,
        choice_index=message.choice_index,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=tuple(_read_logprobs(position) for position in message.logprobs),
        finish_reason=_REASONS_BACK.get(message.finish_reason),
        stop_token_id=message.stop_token_id if cause == "stop_token_id" else None,
        stop_string=message.stop_string if cause == "stop_string" else None,
        usage=_read_usage(message.usage) if message.HasField("usage") else None,
        prompt_logprobs=tuple(_read_logprobs(position) for position in message.prompt_logprobs),
        score=message.score if message.HasField("score") else None,
    )


def write_view(view: RequestView) -> pb.RequestInfo:
    """A live request as ListRequests shows it."""
    return pb.RequestInfo(
        request_id=view.request_id,
        state=_state(view),
        prompt_tokens=view.prompt_tokens,
        output_tokens=view.output_tokens,
        age=write_seconds(view.age_seconds),
        sequence_ids=view.sequence_ids,
        tenant=view.tenant,
    )


def _state(view: RequestView) -> pb.RequestState:
    if view.paused:
        return pb.REQUEST_STATE_PAUSED
    return pb.REQUEST_STATE_RUNNING if view.running else pb.REQUEST_STATE_WAITING


def _read_beam_search(message: pb.BeamSearch) -> BeamSearch:
    return BeamSearch(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        # Proto3 enums are open: a number that this server does not know asks for nothing that it has.
        early_stopping=_EARLY_STOPPING.get(message.early_stopping, EarlyStopping.HEURISTIC),
    )


def _read_structure(message: pb.StructuredOutput) -> StructuredOutput | None:
    match message.WhichOneof("form"):
        case None:
            return None
        case "json_object":
            return StructuredOutput(StructureKind.JSON_OBJECT)
        case "choices":
            return StructuredOutput(StructureKind.CHOICES, tuple(message.choices.texts))
        case form:
            return StructuredOutput(StructureKind(form), (getattr(message, form),))


def _write_logprobs(position: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        chosen=pb.TokenLogprob(token_id=position.token_id, logprob=position.logprob),
        top=[pb.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in position.top],
    )


def _read_logprobs(message: pb.PositionLogprobs) -> PositionLogprobs:
    top = tuple((each.token_id, each.logprob) for each in message.top)
    return PositionLogprobs(message.chosen.token_id, message.chosen.logprob, top)


def _write_usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.output_tokens,
        preemptions=usage.preemptions,
        queue_time=write_seconds(usage.queue_seconds),
        prefill_time=write_seconds(usage.prefill_seconds),
        decode_time=write_seconds(usage.decode_seconds),
        drafted_tokens=usage.drafted_tokens,
        accepted_tokens=usage.accepted_tokens,
        pauses=usage.pauses,
    )


def _read_usage(message: pb.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        output_tokens=message.output_tokens,
        preemptions=message.preemptions,
        queue_seconds=_read_seconds(message.queue_time),
        prefill_seconds=_read_seconds(message.prefill_time),
        decode_seconds=_read_seconds(message.decode_time),
        drafted_tokens=message.drafted_tokens,
        accepted_tokens=message.accepted_tokens,
        pauses=message.pauses,
    )


def write_seconds(seconds: float) -> Duration:
    """So many seconds as a message."""
    whole, nanos = divmod(round(seconds * _NANOS), _NANOS)
    return Duration(seconds=whole, nanos=nanos)


def _read_seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / _NANOS
