"""Who calls: the tenant that a token stands for, and what that tenant may ask for.

Without tokens everybody is ANYBODY, who gets what was asked for. With tokens, services.authentication has refused the
call before a servicer sees it, unless its token is right; `current_caller()` then says whose it is. Answering makes
each request the caller's, so a servicer that generates by it has nothing to do. One that tells of requests asks `owns`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from model_runner.invalid import InvalidRequest
from model_runner.request import MAX_REQUEST_ID_BYTES, Chunk, GenerateRequest

_SEPARATOR = "/"
"""Between a tenant, whose name has none, and a request id."""


class NotYours(Exception):
    """The request asks for what is another tenant's; `field` is the request's that says so."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


class Unauthenticated(Exception):
    """The call has no token, or a wrong one; the sentence says what to do, and the reason which."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Caller:
    """A tenant with its cache salt, which nobody is shown; tenant None: anybody, who may name both."""

    tenant: str | None = None
    cache_salt: str = field(default="", repr=False)

    def engine_id(self, request_id: str) -> str:
        """The name of the caller's request at the engine, where the requests of all tenants live side by side."""
        return request_id if self.tenant is None else f"{self.tenant}{_SEPARATOR}{request_id}"

    def claim(self, request: GenerateRequest) -> GenerateRequest:
        """The request as the caller's. Raises NotYours when it says another's, InvalidRequest for a name too long."""
        if self.tenant is None:
            return request
        tenant, salt = self._tenant_for(request.tenant), self._salt_for(request.cache_salt)
        return replace(request, request_id=self._new_id(request.request_id), tenant=tenant, cache_salt=salt)

    def client_chunk(self, chunk: Chunk) -> Chunk:
        """A chunk of the caller's request, under the name that the caller gave it."""
        return chunk if self.tenant is None else replace(chunk, request_id=self.client_id(chunk.request_id))

    def _new_id(self, request_id: str) -> str:
        engine_id = self.engine_id(request_id)
        added, size = len(engine_id) - len(request_id), len(request_id.encode())
        if added and added + size > MAX_REQUEST_ID_BYTES:
            most = MAX_REQUEST_ID_BYTES - added
            raise InvalidRequest(
                "request_id", f"request_id has {size} bytes; those of this tenant have {most} at most."
            )
        return engine_id

    def client_id(self, engine_id: str) -> str:
        """The name by which the caller knows its request."""
        return engine_id if self.tenant is None else engine_id.removeprefix(f"{self.tenant}{_SEPARATOR}")

    def _tenant_for(self, asked: str) -> str:
        if self.tenant is None or asked in ("", self.tenant):
            return self.tenant or asked
        raise NotYours(
            "tenant", f"The token is that of tenant {self.tenant!r}, not of {asked!r}; leave the tenant out."
        )

    def _salt_for(self, asked: str) -> str:
        if asked in ("", self.cache_salt):
            return self.cache_salt
        raise NotYours("cache_salt", f"The token of tenant {self.tenant!r} sets the cache salt; leave the salt out.")

    def owns(self, tenant: str) -> bool:
        """Whether the caller may know of a request of this tenant."""
        return self.tenant in (None, tenant)


ANYBODY = Caller()

_CALLER: ContextVar[Caller] = ContextVar("octavo_caller", default=ANYBODY)


def current_caller() -> Caller:
    """Who makes the call that is being handled."""
    return _CALLER.get()


def set_caller(caller: Caller) -> None:
    """Says who makes the call that this task handles: each call has a task of its own."""
    _CALLER.set(caller)
