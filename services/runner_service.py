"""The RPCs of octavo.runner.v1: reads requests, turns prompts into tokens, streams the engine's chunks."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from model_runner.constraint import Constraint
from model_runner.engine import Engine
from model_runner.engine_types import EngineState
from model_runner.invalid import InvalidRequest
from model_runner.request import GenerateRequest
from model_runner.tokenizer import Tokenizer
from model_runner.validation import Limits, check_text_size, validate
from services.bad_words import tokenised_words
from services.callers import Caller, current_caller
from services.chat import chat_size, read_chat
from services.form_compiler import FormCompiler, check_form
from services.reader_limits import SLOW_READER_SECONDS
from services.reception import Reception
from services.runner_errors import NotReady, SlowReader, UnknownModel
from services.runner_wire import field_path, read_request, write_chunk, write_view
from services.streams import Streams
from services.traffic import Traffic

Tokens = TypeVar("Tokens")
BadWords = tuple[tuple[int, ...], ...]

LONG_TEXT = 16_384
"""Characters from which on texts are tokenised one at a time: at once they would take every core from the model."""

RUNNER_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service speaks for once the model is loaded."""

    engine: Engine
    tokenizer: Tokenizer
    limits: Limits
    facts: pb.GetModelResponse
    forms: FormCompiler


class ModelRunnerServicer(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """Lives on the event loop; the engine has a thread of its own, and long prompts are tokenised in others.

    `served` is None until the model is loaded. Errors are raised; the server's interceptor makes status codes of them.
    """

    def __init__(self, streams: Streams, slow_reader_seconds: float = SLOW_READER_SECONDS) -> None:
        """slow_reader_seconds: how long a client may take nothing of what is there for it."""
        self.streams = streams
        self.served: ServedModel | None = None
        self.waits_for = "the model to be loaded"
        """What requests are told while they cannot be served."""
        self.traffic = Traffic()
        self._slow_reader_seconds = slow_reader_seconds
        self._reception = Reception()
        self._long_texts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-long-texts")

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        served = self._ready(request.model)
        request_id = request.request_id or uuid.uuid4().hex
        _claim(request, request_id, current_caller())
        with self.traffic.count():
            parsed, constraint = await self._receive(served, request)
            self.streams.check_free(parsed.request_id)
            live = served.engine.submit(parsed, constraint)
            stream = self.streams.open(parsed.request_id, partial(served.engine.throttle, live))
            try:
                # By itself: a status can't follow a first message that is stuck together with what comes before it.
                await context.send_initial_metadata(())
                async for chunk in stream:
                    message = write_chunk(chunk)
                    message.request_id = request_id
                    await self._send(context, message)
            finally:
                self.streams.close(stream)
                if not stream.ended:
                    # The client has gone, or its time is up.
                    served.engine.cancel(live)

    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        served = self._loaded(request.model)
        return pb.TokenizeResponse(token_ids=await self._prompt_token_ids(served, request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        served = self._loaded(request.model)
        _check_vocabulary(request.token_ids, served.limits.vocab_size)
        text = await asyncio.to_thread(
            served.tokenizer.decode, list(request.token_ids), skip_special_tokens=request.skip_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        return self._loaded(request.model).facts

    async def ListRequests(
        self, request: pb.ListRequestsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRequestsResponse:
        caller = current_caller()
        views = [write_view(view) for view in self._loaded("").engine.requests() if caller.owns(view.tenant)]
        for view in views:
            view.request_id = caller.client_id(view.request_id)
        return pb.ListRequestsResponse(requests=views)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        if not request.request_ids:
            raise InvalidRequest("request_ids", "Abort names no request; name at least one.")
        engine_ids = list(map(current_caller().engine_id, request.request_ids))
        aborted, unknown = self._loaded("").engine.abort(engine_ids)
        return pb.AbortResponse(aborted_requests=aborted, unknown_requests=unknown)

    def _loaded(self, model: str) -> ServedModel:
        """What is served. Raises NotReady before it is loaded, UnknownModel for another name."""
        if self.served is None:
            raise NotReady(f"The runner waits for {self.waits_for}; retry shortly.")
        if model and model != self.served.facts.model:
            raise UnknownModel(model, self.served.facts.model)
        return self.served

    def _ready(self, model: str) -> ServedModel:
        self.traffic.check_open()
        served = self._loaded(model)
        if served.engine.state is not EngineState.SERVING:
            raise NotReady(f"The runner waits for {self.waits_for}; retry shortly.")
        return served

    async def _receive(
        self, served: ServedModel, request: pb.GenerateRequest
    ) -> tuple[GenerateRequest, Constraint | None]:
        """The request as the engine takes it, with what holds its answer to a form."""
        with self._reception.receive(served.engine, request.ByteSize()):
            prompt_token_ids = await self._prompt_token_ids(served, request)
            bad_words = await self._bad_words(served, request.sampling.bad_words)
            parsed = read_request(request, request.request_id, prompt_token_ids, bad_words)
            _validate(request, parsed, served.limits)
            return parsed, await served.forms.constraint(parsed.structured_output)

    async def _send(self, context: grpc.aio.ServicerContext, message: pb.GenerateResponse) -> None:
        """Returns when the message is on its way, which takes the client's reading when much is on its way already."""
        try:
            async with asyncio.timeout(self._slow_reader_seconds):
                await context.write(message)
        except TimeoutError:
            raise SlowReader(
                f"The client has read nothing for {self._slow_reader_seconds:g} seconds while there was something to "
                "read; read sooner, or ask for less at a time."
            ) from None

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

    async def _tokenised(self, size: int, work: Callable[[], Tokens]) -> Tokens:
        """Tokenises `size` characters in another thread; long texts wait for each other, short ones for none."""
        threads = self._long_texts if size >= LONG_TEXT else None
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def _claim(request: pb.GenerateRequest, request_id: str, caller: Caller) -> None:
    """Puts the caller's tenant, salt and name for the engine into a request. Raises NotYours for another's."""
    request.tenant = caller.tenant_for(request.tenant)
    request.cache_salt = caller.salt_for(request.cache_salt)
    request.request_id = caller.new_engine_id(request_id)


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
