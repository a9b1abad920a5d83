"""A grpc.aio interceptor that asks every call for a bearer token, and says to servicers whose it is."""

from __future__ import annotations

import ipaddress
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from services.addresses import UnixAddress, parse_address
from services.callers import Caller, Unauthenticated, set_caller
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.rpc_handlers import Stream, Unary, around
from services.token_file import TokenFile

OPEN_SERVICES = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
"""Probes have no token, and what reflection tells is public."""

_SCHEME = "bearer "

Metadata = Sequence[tuple[str, str | bytes]]


class _Guard(grpc.aio.ServerInterceptor):
    """Lets a call to its servicer once its admission has said whose it is."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        admit = None if handler is None else self._admission(handler_call_details)
        return handler if admit is None else _guarded(handler, admit)

    @abstractmethod
    def _admission(self, call: grpc.HandlerCallDetails) -> Callable[[], None] | None:
        """What sets the call's caller, or raises; None for a call that is open to everybody."""


class Authenticator(_Guard):
    """Stands before all services of a server but the open ones; what it raises, an interceptor before it maps.

    open_methods: full names of further methods that need no token, such as '/a.B/HealthCheck'.
    """

    def __init__(self, tokens: TokenFile, open_methods: Collection[str] = ()) -> None:
        self.tokens = tokens
        self._open_methods = frozenset(open_methods)

    def _admission(self, call: grpc.HandlerCallDetails) -> Callable[[], None] | None:
        if call.method in self._open_methods or call.method.split("/")[1] in OPEN_SERVICES:
            return None
        return partial(self._admit, call.invocation_metadata)

    def _admit(self, metadata: Metadata) -> None:
        set_caller(self._caller(metadata))

    def _caller(self, metadata: Metadata) -> Caller:
        caller = self.tokens.caller(_token(metadata))
        if caller is None:
            raise Unauthenticated("TOKEN_UNKNOWN", "The token is none of this server's; ask its operator for yours.")
        return caller


class StandIn(_Guard):
    """Stands before a server whose callers have no token: all of them are one tenant."""

    def __init__(self, tokens: TokenFile, tenant: str) -> None:
        self._tokens = tokens
        self._tenant = tenant

    def _admission(self, call: grpc.HandlerCallDetails) -> Callable[[], None]:
        return self._admit

    def _admit(self) -> None:
        caller = self._tokens.caller_of(self._tenant)
        if caller is None:
            raise Unauthenticated(
                "TENANT_UNKNOWN",
                f"Calls here are those of tenant {self._tenant!r}, who has no token any more.",
            )
        set_caller(caller)


def open_stand_ins(settings: ModelRunnerSettings, guards: Sequence[Authenticator]) -> tuple[StandIn, ...]:
    """What stands before --vllm-address, where `guards` stand before the others. Raises StartupError."""
    tenant = settings.vllm_tenant
    if not guards:
        if tenant is not None:
            raise StartupError("--vllm-tenant is one of --auth-tokens, and there are none.")
        return ()
    if tenant is None:
        raise StartupError(
            "--vllm-address asks nobody for a token: with --auth-tokens, say by --vllm-tenant whose its requests are."
        )
    tokens = guards[0].tokens
    if tokens.caller_of(tenant) is None:
        raise StartupError(f"--vllm-tenant {tenant}: no token of {settings.auth_tokens} is that tenant's.")
    return (StandIn(tokens, tenant),)


def open_guards(settings: ModelRunnerSettings, open_methods: Collection[str] = ()) -> tuple[Authenticator, ...]:
    """What stands before the services as the settings want it: nothing without tokens. Raises StartupError."""
    if settings.auth_tokens is None:
        return ()
    if settings.block_hash != "sha256":
        raise StartupError(
            f"--auth-tokens keeps tenants apart by cache salts, which --block-hash {settings.block_hash} cannot take."
        )
    if not (settings.server_tls() or settings.allow_plaintext_tokens or _is_local(settings.runner_address)):
        raise StartupError(
            f"--auth-tokens without TLS would show the tokens to the network of {settings.runner_address}: give "
            "--tls-cert and --tls-key, or --allow-plaintext-tokens behind a mesh that encrypts."
        )
    return (Authenticator(TokenFile(settings.auth_tokens), open_methods),)


def _is_local(address: str) -> bool:
    parsed = parse_address(address)
    if isinstance(parsed, UnixAddress) or parsed.host == "localhost":
        return True
    try:
        return ipaddress.ip_address(parsed.host).is_loopback
    except ValueError:
        return False


def _token(metadata: Metadata) -> str:
    given = [value for key, value in metadata if key == "authorization"]
    if not given:
        raise Unauthenticated(
            "TOKEN_MISSING",
            "The call has no token; send the metadata 'authorization: Bearer TOKEN' (the octavo command takes it from "
            "OCTAVO_AUTH_TOKEN or --auth-token-file).",
        )
    text = given[0] if len(given) == 1 else ""
    if not isinstance(text, str) or not text[: len(_SCHEME)].lower() == _SCHEME:
        raise Unauthenticated("TOKEN_MALFORMED", "The metadata 'authorization' must be 'Bearer TOKEN', once.")
    return text[len(_SCHEME) :].strip()


def _guarded(handler: grpc.RpcMethodHandler, admit: Callable[[], None]) -> grpc.RpcMethodHandler:
    """The handler behind `admit`, which raises when the call may not be."""

    def unary(behaviour: Unary) -> Unary:
        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> Any:
            admit()
            return await behaviour(request, context)

        return guarded

    def stream(behaviour: Stream) -> Stream:
        async def guarded(request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            admit()
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return guarded

    return around(handler, unary, stream, handler.request_deserializer)
