"""A grpc.aio interceptor around every Octavo verb: maps exceptions to status codes and measures latency."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry, Histogram

from services.errors import ErrorMapping, abort, failure_of, malformed_failure, unimplemented_failure
from services.rpc_handlers import Stream, Unary, around

RPC_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1, 5, 30, 120, 600)
"""Upper bounds in seconds: from a verb on the books to a long stream."""

STATUS_SECONDS = 1.0
"""How long a handler waits until its client has taken the status of a call that fails."""

_MALFORMED = object()


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb by the full name of its service and its own."""

    service: str
    method: str


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Observes `octavo_rpc_duration_seconds{service,method,code}` and turns what handlers raise into gRPC status.

    A handler raises; `mapping` says what that means. What it does not know is logged and told as INTERNAL. Health and
    reflection are left alone: probes would drown the verbs.
    """

    def __init__(self, registry: CollectorRegistry, mapping: ErrorMapping, domain: str) -> None:
        self._mapping = mapping
        self._domain = domain
        self._durations = Histogram(
            "octavo_rpc_duration_seconds",
            "Seconds from the arrival of an RPC to its end, by service, method and status code.",
            ("service", "method", "code"),
            registry=registry,
            buckets=RPC_BUCKETS,
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        service, _, method = handler_call_details.method.lstrip("/").partition("/")
        if handler is None or service.startswith("grpc."):
            return handler
        return self._wrapped(handler, Verb(service, method))

    def _wrapped(self, handler: grpc.RpcMethodHandler, verb: Verb) -> grpc.RpcMethodHandler:
        parse = _tolerant(handler.request_deserializer)
        return around(handler, partial(self._unary, verb=verb), partial(self._stream, verb=verb), parse)

    def _unary(self, behaviour: Unary, verb: Verb) -> Unary:
        async def measured(request: Any, context: grpc.aio.ServicerContext) -> Message:
            async with _Measured(self, verb, context):
                await self._refuse_malformed(request, context)
                return await behaviour(request, context)

        return measured

    def _stream(self, behaviour: Stream, verb: Verb) -> Stream:
        async def measured(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Message, None]:
            async with _Measured(self, verb, context):
                await self._refuse_malformed(request, context)
                async with aclosing(behaviour(request, context)) as answers:
                    async for answer in answers:
                        yield answer

        return measured

    async def _refuse_malformed(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        if request is _MALFORMED:
            await abort(context, malformed_failure(self._domain))

    async def fail(self, error: BaseException, verb: Verb, context: grpc.aio.ServicerContext) -> None:
        """Ends the RPC with the status that `error` means."""
        if isinstance(error, NotImplementedError) and _name(context.code()) == "UNIMPLEMENTED":
            # What the generated base class does for a verb that the servicer does not have.
            await abort(context, unimplemented_failure(self._domain, verb.method))
        if context.code():
            # A status was on its way when the client went; there is nobody to tell another one.
            raise asyncio.CancelledError from error
        failure = failure_of(error, self._mapping, self._domain, f"{verb.service}/{verb.method}")
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await abort(context, failure)
        except TimeoutError:
            # A client that reads nothing does not take its status either. It is on its way, and grpc.aio, which would
            # send another one for any other exception, lets go of a handler that is cancelled.
            raise asyncio.CancelledError from None

    def observe(self, verb: Verb, code: str, seconds: float) -> None:
        """Counts one RPC that ended with the status `code` after so many seconds."""
        self._durations.labels(verb.service, verb.method, code).observe(seconds)


class _Measured:
    """The span of one RPC: on the way out it maps the exception, if any, and observes the code that the client gets."""

    __slots__ = ("_context", "_interceptor", "_start", "_verb")

    def __init__(self, interceptor: RpcInterceptor, verb: Verb, context: grpc.aio.ServicerContext) -> None:
        self._interceptor = interceptor
        self._verb = verb
        self._context = context

    async def __aenter__(self) -> None:
        self._start = time.perf_counter()

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None and not _ends_by_itself(error):
                await self._interceptor.fail(error, self._verb, self._context)
        finally:
            code = _final_code(self._context, error)
            self._interceptor.observe(self._verb, code, time.perf_counter() - self._start)


def _ends_by_itself(error: BaseException) -> bool:
    """True for what grpc.aio handles: its own abort, and a call that the client or a deadline ended."""
    return isinstance(error, grpc.aio.AbortError | asyncio.CancelledError | GeneratorExit)


def _final_code(context: grpc.aio.ServicerContext, error: BaseException | None) -> str:
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        remaining = context.time_remaining()
        return "DEADLINE_EXCEEDED" if remaining is not None and remaining <= 0 else "CANCELLED"
    return _name(context.code())


def _name(code: grpc.StatusCode | int | None) -> str:
    """The name of a context's code, which grpc.aio keeps as None or 0, as a number, or as a member of the enum."""
    if not code:
        return "OK"
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((each.name for each in grpc.StatusCode if each.value[0] == code), "UNKNOWN")


def _tolerant(parse: Callable[[bytes], Message] | None) -> Callable[[bytes], object]:
    """Puts a marker in the place of a request that cannot be parsed, so that the handler can refuse it by code."""

    def parsed(data: bytes) -> object:
        if parse is None:
            return data
        try:
            return parse(data)
        except DecodeError:
            return _MALFORMED

    return parsed
