"""Octavo for Python programs: `Client` and `AsyncClient` wrap the model runner's RPCs.

with Client("unix:/run/octavo/runner.sock") as client:
    for chunk in client.generate("Once upon a time", max_tokens=32):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from model_runner.request import Chunk
from services.channels import ClientTls, open_aio_channel, open_channel
from services.client_retry import Deadline, RetryPolicy, may_retry, must_ask
from services.errors import describe_rpc_error
from services.runner_wire import read_chunk

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_RETRY = RetryPolicy()
Prompt = str | Sequence[int] | None
ChatMessages = Sequence[Mapping[str, Any]]
"""OpenAI's form: role and content, and where they are needed name, tool_calls and tool_call_id."""


class OctavoError(Exception):
    """A call that failed: `code` is the gRPC status by name, the message the server's sentence.

    reason and metadata are those of google.rpc.ErrorInfo, empty when the server sent none.
    """

    def __init__(self, code: str, sentence: str, reason: str = "", metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{sentence} ({code})")
        self.code = code
        self.sentence = sentence
        self.reason = reason
        self.metadata = dict(metadata or {})

    @classmethod
    def of(cls, error: grpc.RpcError, address: str, *, begun: bool = False) -> OctavoError:
        """The same failure without gRPC's clothes. begun: a part of the answer had come already."""
        view = describe_rpc_error(error)
        if view.code == "UNAVAILABLE" and not view.reason:
            ended = f"The model runner at {address} stopped before the answer was complete."
            return cls(view.code, ended if begun else f"No model runner answers at {address}; is it running?")
        return cls(*view)


class GenerateOptions(TypedDict, total=False):
    """How an answer is made; what is left out or None has no effect. The .proto file says what each does.

    priority is that of the retention, queue_priority the request's own. beam_width begins a beam search. A schema, a
    tool and template_arguments may be Python objects or JSON.
    """

    chat: ChatMessages | None
    tools: Sequence[Mapping[str, Any] | str]
    continue_final_message: bool
    template_arguments: Mapping[str, Any] | str
    max_tokens: int | None
    min_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    stop: Sequence[str]
    include_stop_string: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    best_of: int
    beam_width: int | None
    length_penalty: float | None
    early_stopping: Literal["first", "never"] | None
    json_schema: Mapping[str, Any] | str | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choices: Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: int | None
    request_id: str
    model: str
    skip_cache_read: bool
    skip_cache_write: bool
    cache_salt: str
    tenant: str
    priority: int
    pin_seconds: float
    queue_priority: int


_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "bad_words",
)
_STOP = {
    "max_tokens": "max_tokens",
    "stop": "stop_strings",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "min_tokens": "min_tokens",
    "include_stop_string": "include_stop_string",
}
_RETENTION = ("priority", "pin_seconds")
_REST = {
    "n": "num_choices",
    "best_of": "best_of",
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "request_id": "request_id",
    "model": "model",
    "skip_cache_read": "skip_cache_read",
    "skip_cache_write": "skip_cache_write",
    "cache_salt": "cache_salt",
    "tenant": "tenant",
    "queue_priority": "priority",
}
_EARLY_STOPPING = {"first": pb.EARLY_STOPPING_FIRST, "never": pb.EARLY_STOPPING_NEVER}
_FORMS = ("json_schema", "json_object", "regex", "grammar", "choices")


def generate_request(prompt: Prompt = None, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """The message for a prompt (text or token ids) or a chat ({"role", "content"} each).

    Raises ValueError when there is not exactly one of prompt and chat, or a value that no message can carry, and
    TypeError for an option that does not exist.
    """
    if unknown := options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
    chat = options.get("chat")
    if (prompt is None) == (chat is None):
        raise ValueError("give either a prompt or a chat")
    given = {name: value for name, value in options.items() if value is not None}
    message = pb.GenerateRequest(
        sampling=pb.SamplingParams(**{name: given[name] for name in _SAMPLING if name in given}),
        stop=pb.StopConditions(**{field: given[name] for name, field in _STOP.items() if name in given}),
        **{field: given[name] for name, field in _REST.items() if name in given},
    )
    if retention := {name: given[name] for name in _RETENTION if name in given}:
        message.retention.CopyFrom(pb.Retention(**retention))
    if (allowed := given.get("allowed_token_ids")) is not None:
        message.sampling.allowed_token_ids.CopyFrom(pb.TokenIds(ids=allowed))
    _write_search(message, given)
    _write_form(message, given)
    if chat is not None:
        message.chat.CopyFrom(_chat(chat, given))
    elif isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return message


def _write_search(message: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    if "beam_width" in given:
        way = given.get("early_stopping")
        if way is not None and way not in _EARLY_STOPPING:
            raise ValueError(f"early_stopping is {way!r}; say 'first' or 'never', or leave it out")
        search = pb.BeamSearch(
            width=given["beam_width"],
            length_penalty=given.get("length_penalty"),
            early_stopping=_EARLY_STOPPING.get(way),
        )
        message.beam_search.CopyFrom(search)
    elif lone := [name for name in ("length_penalty", "early_stopping") if name in given]:
        raise ValueError(f"{lone[0]} is of a beam search: give its beam_width too")


def _write_form(message: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    forms = [name for name in _FORMS if given.get(name)]
    if len(forms) > 1:
        raise ValueError(f"{' and '.join(forms)} cannot go together")
    for form in forms:
        value = given[form]
        if form == "choices":
            message.structured_output.choices.CopyFrom(pb.Choices(texts=value))
        else:
            setattr(message.structured_output, form, _as_json(value) if form == "json_schema" else value)


def _as_json(value: Mapping[str, Any] | str) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class Client:
    """A blocking client of one model runner at 'host:port' or 'unix:/path'. Thread-safe; close it when done.

    timeout: seconds for a whole call, None for no limit. retry: how often a generate() that nobody has started is sent
    again while the server is UNAVAILABLE; one with a request_id of yours only when the server says that it does not
    know it. Every call raises OctavoError when it fails.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: ClientTls | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._retry = retry
        self._channel = open_channel(address, tls)
        self._stub = model_runner_pb2_grpc.ModelRunnerServiceStub(self._channel)

    def generate(self, prompt: Prompt = None, **options: Unpack[GenerateOptions]) -> Iterator[Chunk]:
        """Streams an answer; the options are those of GenerateOptions. Closing the iterator aborts the request."""
        # Checked here, not at the first chunk: a generator function would wait with it.
        return self.stream(generate_request(prompt, **options))

    def stream(self, request: pb.GenerateRequest) -> Iterator[Chunk]:
        """generate() for a message that is made already."""
        deadline = Deadline(self._timeout)
        pauses = self._retry.pauses()
        while True:
            call = self._stub.Generate(request, timeout=deadline.left)
            begun = False
            try:
                for message in call:
                    begun = True
                    yield read_chunk(message)
                return
            except grpc.RpcError as error:
                if not self._may_send_again(request, error, begun, pauses, deadline):
                    raise OctavoError.of(error, self.address, begun=begun) from None
            finally:
                call.cancel()

    def _may_send_again(
        self, request: pb.GenerateRequest, failure: grpc.RpcError, begun: bool, pauses: Iterator[float], left: Deadline
    ) -> bool:
        """Waits until a request may be sent again; false when it may not."""
        view = describe_rpc_error(failure)
        if not may_retry(view, begun):
            return False
        for pause in pauses:
            if not left.allows(pause):
                return False
            time.sleep(pause)
            if not must_ask(view, request.request_id):
                return True
            try:
                answer = self._stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=left.left)
            except grpc.RpcError:
                continue
            return bool(answer.unknown_requests)
        return False

    def tokenize(self, text: str | None = None, *, chat: ChatMessages | None = None) -> list[int]:
        """The token ids that generate() would use."""
        return list(self._call(self._stub.Tokenize, _tokenize_request(text, chat)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str(self._call(self._stub.Detokenize, request).text)

    def model(self) -> pb.GetModelResponse:
        """The model and the limits of the server."""
        return self._call(self._stub.GetModel, pb.GetModelRequest())

    def requests(self) -> list[pb.RequestInfo]:
        """The live requests."""
        return list(self._call(self._stub.ListRequests, pb.ListRequestsRequest()).requests)

    def abort(self, *request_ids: str) -> tuple[int, int]:
        """Ends requests by id; how many were live, and how many unknown."""
        answer = self._call(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))
        return answer.aborted_requests, answer.unknown_requests

    def close(self) -> None:
        """Closes the connection; streams that are open end."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, verb: Any, request: Any) -> Any:
        try:
            return verb(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise OctavoError.of(error, self.address) from None


class AsyncClient:
    """The same for asyncio: `async for chunk in client.generate(...)`, `await client.tokenize(...)`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: ClientTls | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._retry = retry
        self._channel = open_aio_channel(address, tls)
        self._stub = model_runner_pb2_grpc.ModelRunnerServiceStub(self._channel)

    def generate(self, prompt: Prompt = None, **options: Unpack[GenerateOptions]) -> AsyncIterator[Chunk]:
        """Streams an answer; the options are those of GenerateOptions. Closing the iterator aborts the request."""
        return self.stream(generate_request(prompt, **options))

    async def stream(self, request: pb.GenerateRequest) -> AsyncIterator[Chunk]:
        """generate() for a message that is made already."""
        deadline = Deadline(self._timeout)
        pauses = self._retry.pauses()
        while True:
            call = self._stub.Generate(request, timeout=deadline.left)
            begun = False
            try:
                async for message in call:
                    begun = True
                    yield read_chunk(message)
                return
            except grpc.RpcError as error:
                if not await self._may_send_again(request, error, begun, pauses, deadline):
                    raise OctavoError.of(error, self.address, begun=begun) from None
            finally:
                call.cancel()

    async def _may_send_again(
        self, request: pb.GenerateRequest, failure: grpc.RpcError, begun: bool, pauses: Iterator[float], left: Deadline
    ) -> bool:
        view = describe_rpc_error(failure)
        if not may_retry(view, begun):
            return False
        for pause in pauses:
            if not left.allows(pause):
                return False
            await asyncio.sleep(pause)
            if not must_ask(view, request.request_id):
                return True
            try:
                answer = await self._stub.Abort(pb.AbortRequest(request_ids=[request.request_id]), timeout=left.left)
            except grpc.RpcError:
                continue
            return bool(answer.unknown_requests)
        return False

    async def tokenize(self, text: str | None = None, *, chat: ChatMessages | None = None) -> list[int]:
        """The token ids that generate() would use."""
        return list((await self._call(self._stub.Tokenize, _tokenize_request(text, chat))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._call(self._stub.Detokenize, request)).text)

    async def model(self) -> pb.GetModelResponse:
        """The model and the limits of the server."""
        return await self._call(self._stub.GetModel, pb.GetModelRequest())

    async def requests(self) -> list[pb.RequestInfo]:
        """The live requests."""
        return list((await self._call(self._stub.ListRequests, pb.ListRequestsRequest())).requests)

    async def abort(self, *request_ids: str) -> tuple[int, int]:
        """Ends requests by id; how many were live, and how many unknown."""
        answer = await self._call(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))
        return answer.aborted_requests, answer.unknown_requests

    async def close(self) -> None:
        """Closes the connection; streams that are open end."""
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, verb: Any, request: Any) -> Any:
        try:
            return await verb(request, timeout=self._timeout)
        except grpc.RpcError as error:
            raise OctavoError.of(error, self.address) from None


def _chat(messages: ChatMessages, given: Mapping[str, Any] | None = None) -> pb.Chat:
    options = given or {}
    return pb.Chat(
        messages=[_message(each) for each in messages],
        tools=[_as_json(each) for each in options.get("tools", ())],
        continue_final_message=options.get("continue_final_message", False),
        template_arguments=_as_json(options.get("template_arguments", "")),
    )


def _message(message: Mapping[str, Any]) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=message["role"],
        content=message.get("content") or "",
        name=message.get("name"),
        tool_calls=[_tool_call(each) for each in message.get("tool_calls") or ()],
        tool_call_id=message.get("tool_call_id"),
    )


def _tool_call(call: Mapping[str, Any]) -> pb.ToolCall:
    function = call["function"]
    return pb.ToolCall(id=call.get("id"), name=function["name"], arguments=_as_json(function["arguments"]))


def _tokenize_request(text: str | None, chat: ChatMessages | None) -> pb.TokenizeRequest:
    if (text is None) == (chat is None):
        raise ValueError("give either a text or a chat")
    return pb.TokenizeRequest(text=text) if chat is None else pb.TokenizeRequest(chat=_chat(chat))
