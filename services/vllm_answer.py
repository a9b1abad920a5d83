"""The engine's chunks as answers of vllm.grpc.engine: new tokens as they come, and one Complete for each choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from model_runner.request import Chunk, GenerateRequest, PositionLogprobs, Usage


@dataclass(slots=True)
class _Choice:
    """What one choice has so far. Without a stream its tokens and log-probabilities wait here for the end."""

    begun: bool = False
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class VllmAnswer:
    """Writes one request's answer. usage, of each write: what the request has cost so far."""

    def __init__(self, request: GenerateRequest, *, streams: bool) -> None:
        """streams: tokens go out as they come; else all of them with the Complete of their choice."""
        self._request = request
        self._streams = streams
        self._choices: dict[int, _Choice] = {}
        self._prompt: pb.InputLogProbs | None = None

    def write(self, chunk: Chunk, usage: Usage) -> list[pb.GenerateResponse]:
        """What goes on the wire for a chunk: nothing, its tokens, the end of its choice, or both."""
        choice = self._choices.setdefault(chunk.choice_index, _Choice())
        choice.num_tokens += len(chunk.token_ids)
        if chunk.prompt_logprobs:
            self._prompt = input_logprobs(self._request, chunk.prompt_logprobs)
        answers = []
        if not self._streams:
            choice.token_ids += chunk.token_ids
            choice.logprobs += chunk.logprobs
        elif chunk.token_ids:
            answers.append(pb.GenerateResponse(chunk=self._stream_chunk(chunk, choice, usage)))
            choice.begun = True
        if chunk.finish_reason is not None:
            answers.append(pb.GenerateResponse(complete=self._complete(chunk, choice, usage)))
        return answers

    def _stream_chunk(self, chunk: Chunk, choice: _Choice, usage: Usage) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=usage.prompt_tokens,
            # Of this chunk alone; its reader adds up.
            completion_tokens=len(chunk.token_ids),
            cached_tokens=usage.cached_tokens,
            output_logprobs=output_logprobs(chunk.logprobs),
            input_logprobs=None if choice.begun else self._prompt,
            index=chunk.choice_index,
        )

    def _complete(self, chunk: Chunk, choice: _Choice, usage: Usage) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=choice.token_ids,
            finish_reason=chunk.finish_reason.value if chunk.finish_reason else "",
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=choice.num_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=output_logprobs(choice.logprobs),
            input_logprobs=None if choice.begun else self._prompt,
            index=chunk.choice_index,
            spec_accepted_tokens=usage.accepted_tokens,
            spec_draft_tokens=usage.drafted_tokens,
        )
        # The model's own end is no match; only what the request named is.
        if chunk.stop_token_id is not None and chunk.stop_token_id in self._request.stop.stop_token_ids:
            complete.matched_token_id = chunk.stop_token_id
        if chunk.stop_string is not None:
            complete.matched_stop_str = chunk.stop_string
        return complete


def output_logprobs(positions: Sequence[PositionLogprobs]) -> pb.OutputLogProbs | None:
    """Log-probabilities of generated tokens; None for none."""
    if not positions:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[position.logprob for position in positions],
        token_ids=[position.token_id for position in positions],
        top_logprobs=[_top(position.top) for position in positions],
    )


def input_logprobs(request: GenerateRequest, positions: Sequence[PositionLogprobs]) -> pb.InputLogProbs:
    """Log-probabilities of a prompt. positions: from its second token on, since the first has none."""
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb(),
            *(pb.InputTokenLogProb(value=position.logprob) for position in positions),
        ],
        token_ids=[request.prompt_token_ids[0], *(position.token_id for position in positions)],
        top_logprobs=[pb.TopLogProbs(), *(_top(position.top) for position in positions)],
    )


def _top(candidates: Iterable[tuple[int, float]]) -> pb.TopLogProbs:
    message = pb.TopLogProbs()
    for token_id, logprob in candidates:
        message.token_ids.append(token_id)
        message.values.append(logprob)
    return message
