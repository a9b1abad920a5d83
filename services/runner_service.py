"""The RPCs of octavo.runner.v1: reads requests, turns prompts into tokens, and has them answered."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import partial

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from model_runner.invalid import InvalidRequest
from model_runner.request import GenerateRequest
from model_runner.sequence import LiveRequest
from model_runner.validation import Limits, check_text_size, validate
from services.answering import Answering, Received, ServedModel, Writer
from services.bad_words import tokenised_words
from services.callers import current_caller
from services.chat import chat_size, read_chat
from services.form_compiler import check_form
from services.runner_wire import field_path, read_request, write_chunk, write_view

BadWords = tuple[tuple[int, ...], ...]

RUNNER_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name


class ModelRunnerServicer(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """Lives on the event loop; the engine has a thread of its own, and long prompts are tokenised in others.

    Errors are raised; the server's interceptor makes status codes of them.
    """

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._tokenised = answering.texts.tokenised

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        served = self._answering.ready(request.model)
        receive = partial(self._receive, served, request)
        await self._answering.answer(served, request, request.request_id, receive, _writer, context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        served = self._answering.loaded(request.model)
        return pb.TokenizeResponse(token_ids=await self._prompt_token_ids(served, request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        served = self._answering.loaded(request.model)
        _check_vocabulary(request.token_ids, served.limits.vocab_size)
        text = await asyncio.to_thread(
            served.tokenizer.decode, list(request.token_ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return self._answering.loaded(request.model).facts

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRequestsResponse:
        caller = current_caller()
        views = [write_view(view) for view in self._answering.loaded().engine.requests() if caller.owns(view.tenant)]
        for view in views:
            view.request_id = caller.client_id(view.request_id)
        return pb.ListRequestsResponse(requests=views)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not request.request_ids:
            raise InvalidRequest("request_ids", "Abort names no request; name at least one.")
        aborted, unknown = self._answering.abort(request.request_ids)
        return pb.AbortResponse(aborted_requests=aborted, unknown_requests=unknown)

    async def _receive(self, served: ServedModel, request: pb.GenerateRequest) -> Received:
        """The request as the engine takes it, with what holds its answer to a form."""
        prompt_token_ids = await self._prompt_token_ids(served, request)
        bad_words = await self._bad_words(served, request.sampling.bad_words)
        parsed = read_request(request, request.request_id or uuid.uuid4().hex, prompt_token_ids, bad_words)
        _validate(request, parsed, served.limits)
        return parsed, await served.forms.constraint(parsed.structured_output)

    async def _prompt_token_ids(
        self, served: ServedModel, request: pb.GenerateRequest | pb.TokenizeRequest
    ) -> Sequence[int]:
        match request.WhichOneof("prompt"):
            case "text":
                check_text_size("text", request.text, served.tokenizer.longest_token_bytes, served.limits)
                return await self._tokenised(len(request.text), partial(served.tokenizer.encode, request.text))
            case "token_ids":
                return request.token_ids.ids
            case "chat":
                return await self._tokenised(chat_size(request.chat), partial(_encode_chat, served, request.chat))
            case _:
                raise InvalidRequest("prompt", "The request has no prompt; give text, token_ids or chat.")

    async def _bad_words(self, served: ServedModel, words: Sequence[str]) -> BadWords:
        if not words:
            return ()
        return await self._tokenised(sum(map(len, words)), partial(tokenised_words, served.tokenizer, words))


def _writer(live: LiveRequest) -> Writer:
    return lambda chunk: (write_chunk(chunk),)


def _validate(message: pb.GenerateRequest, parsed: GenerateRequest, limits: Limits) -> None:
    check_form(message)
    try:
        validate(parsed, limits)
    except InvalidRequest as error:
        raise InvalidRequest(field_path(message, error.field), str(error)) from None


def _encode_chat(served: ServedModel, chat: pb.Chat) -> list[int]:
    tokenizer, conversation = served.tokenizer, read_chat(chat)
    text = tokenizer.render_chat(conversation.messages, **conversation.options)
    check_text_size("chat", text, tokenizer.longest_token_bytes, served.limits)
    # The template writes the special tokens itself.
    return tokenizer.encode(text, add_special_tokens=False)


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequest(
                "token_ids",
                f"Token id {token_id} at index {index} is outside the vocabulary; use 0 to {vocab_size - 1}.",
            )
