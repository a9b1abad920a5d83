"""Octavo for Python programs: `Client` and `AsyncClient` wrap the model runner's RPCs.

with Client("unix:/run/octavo/runner.sock") as client:
    for chunk in client.generate("Once upon a time", max_tokens=32):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Unpack

import grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from model_runner.request import Chunk
from services.channels import ClientTls, open_aio_channel, open_channel
from services.client_request import (
    ChatMessages,
    ChatOptions,
    GenerateOptions,
    Prompt,
    generate_request,
    tokenize_request,
)
from services.client_retry import Deadline, RetryPolicy, may_retry, must_ask
from services.connection_faults import tls_fault
from services.errors import describe_rpc_error
from services.runner_wire import read_chunk

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_RETRY = RetryPolicy()


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
            if fault := tls_fault(view.sentence):
                return cls(view.code, f"The model runner at {address} cannot be reached: {fault}.")
            ended = f"The model runner at {address} stopped before the answer was complete."
            return cls(view.code, ended if begun else f"No model runner answers at {address}; is it running?")
        return cls(*view)


def _bearer(token: str | None) -> tuple[tuple[str, str], ...]:
    return () if token is None else (("authorization", f"Bearer {token}"),)


class Client:
    """A blocking client of one model runner at 'host:port' or 'unix:/path'. Thread-safe; close it when done.

    token: the bearer token of a server that asks for one. timeout: seconds for a whole call, None for no limit. retry:
    how often a generate() that nobody has started is sent again while the server is UNAVAILABLE; one with a request_id
    of yours only when the server says that it does not know it. Every call raises OctavoError when it fails.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._metadata = _bearer(token)
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
            call = self._stub.Generate(request, timeout=deadline.left, metadata=self._metadata)
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
                known = pb.AbortRequest(request_ids=[request.request_id])
                answer = self._stub.Abort(known, timeout=left.left, metadata=self._metadata)
            except grpc.RpcError:
                continue
            return bool(answer.unknown_requests)
        return False

    def tokenize(
        self, text: str | None = None, *, chat: ChatMessages | None = None, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """The token ids that generate() would use."""
        return list(self._call(self._stub.Tokenize, tokenize_request(text, chat, **options)).token_ids)

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
            return verb(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise OctavoError.of(error, self.address) from None


class AsyncClient:
    """The same for asyncio: `async for chunk in client.generate(...)`, `await client.tokenize(...)`."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: ClientTls | None = None,
        token: str | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self.address = address
        self._timeout = timeout
        self._metadata = _bearer(token)
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
            call = self._stub.Generate(request, timeout=deadline.left, metadata=self._metadata)
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
                known = pb.AbortRequest(request_ids=[request.request_id])
                answer = await self._stub.Abort(known, timeout=left.left, metadata=self._metadata)
            except grpc.RpcError:
                continue
            return bool(answer.unknown_requests)
        return False

    async def tokenize(
        self, text: str | None = None, *, chat: ChatMessages | None = None, **options: Unpack[ChatOptions]
    ) -> list[int]:
        """The token ids that generate() would use."""
        return list((await self._call(self._stub.Tokenize, tokenize_request(text, chat, **options))).token_ids)

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
            return await verb(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise OctavoError.of(error, self.address) from None
