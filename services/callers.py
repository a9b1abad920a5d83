"""Who calls: the tenant that a token stands for, and what that tenant may ask for.

A servicer asks `current_caller()` while it handles a call, and passes what the client sent through the caller:

    caller = current_caller()
    tenant, salt = caller.tenant_for(request.tenant), caller.salt_for(request.cache_salt)
    engine_id = caller.new_engine_id(request.request_id)

Without tokens everybody is ANYBODY, who gets what was asked for. With tokens, services.authentication has refused the
call before unless its token is right.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from model_runner.invalid import InvalidRequest
from model_runner.request import MAX_REQUEST_ID_BYTES

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

    def tenant_for(self, asked: str) -> str:
        """The tenant of a request that says `asked`. Raises NotYours for another one than the caller's."""
        if self.tenant is None:
            return asked
        if asked not in ("", self.tenant):
            raise NotYours(
                "tenant", f"The token is that of tenant {self.tenant!r}, not of {asked!r}; leave the tenant out."
            )
        return self.tenant

    def salt_for(self, asked: str) -> str:
        """The salt of a request that says `asked`. Raises NotYours for another one than the caller's."""
        if self.tenant is None:
            return asked
        if asked not in ("", self.cache_salt):
            raise NotYours(
                "cache_salt", f"The token of tenant {self.tenant!r} sets the cache salt; leave the salt out."
            )
        return self.cache_salt

    def engine_id(self, request_id: str) -> str:
        """The name of the caller's request at the engine, where the requests of all tenants live side by side."""
        return request_id if self.tenant is None else f"{self.tenant}{_SEPARATOR}{request_id}"

    def new_engine_id(self, request_id: str) -> str:
        """The same for a new request. Raises InvalidRequest for a name that is too long with the tenant's before it."""
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
