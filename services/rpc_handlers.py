"""A verb's handler with something around its behaviour, whichever of gRPC's four kinds it is."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc

Unary = Callable[..., Awaitable[Any]]
"""A behaviour that returns its answer, or sends its answers itself."""

Stream = Callable[..., AsyncGenerator[Any, None]]
"""A behaviour that yields its answers."""


def around(
    handler: grpc.RpcMethodHandler,
    unary: Callable[[Unary], Unary],
    stream: Callable[[Stream], Stream],
    parse: Callable[[bytes], Any] | None,
) -> grpc.RpcMethodHandler:
    """The handler with `stream` around a behaviour that yields and `unary` around any other. parse: reads requests."""

    def wrapped(behaviour: Any) -> Any:
        return stream(behaviour) if inspect.isasyncgenfunction(behaviour) else unary(behaviour)

    serialize = handler.response_serializer
    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(wrapped(handler.unary_unary), parse, serialize)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(wrapped(handler.unary_stream), parse, serialize)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(wrapped(handler.stream_unary), parse, serialize)
    return grpc.stream_stream_rpc_method_handler(wrapped(handler.stream_stream), parse, serialize)
