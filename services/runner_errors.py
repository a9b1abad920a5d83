"""Why the model runner refuses an RPC, and what that is on the wire."""

from __future__ import annotations

import grpc

from model_runner.chat_template import ChatTemplateError
from model_runner.engine_types import DuplicateRequest, EngineStopped, QueueFull
from model_runner.invalid import InvalidRequest
from services.callers import NotYours, Unauthenticated
from services.errors import RUNNER_DOMAIN, RpcFailure

START_RETRY_SECONDS = 0.5
"""What RetryInfo advises while the runner waits for its model or its KV manager."""


class NotReady(Exception):
    """The runner cannot take requests now; the sentence says what it waits for."""


class UnknownModel(Exception):
    """The request names another model than the one served."""

    def __init__(self, asked: str, served: str) -> None:
        super().__init__(f"Model {asked!r} is not served here; the model is {served!r} (or leave the name empty).")
        self.asked = asked


class RequestFailed(Exception):
    """The engine gave a request up; the sentence says why."""


class RequestRefused(Exception):
    """The KV manager does not take what the request asks for; the sentence is the KV manager's."""


class PinsExhausted(Exception):
    """As much of the pool is pinned as may be; the sentence is the KV manager's."""


class SlowReader(Exception):
    """The client has taken nothing of its stream for too long; the sentence says for how long."""


class FormStuck(Exception):
    """The form of the answer cannot go on from what was drawn; the sentence says why."""


class FormsUnavailable(Exception):
    """This server has no structured output; the sentence says what is missing."""


class Unsupported(Exception):
    """A request asks for something that this server does not have; the sentence says what to leave out."""


class TooFarBehind(Exception):
    """A subscriber's place among numbered changes is not kept any more, or never was; it must begin anew."""


def runner_failure(error: BaseException) -> RpcFailure | None:
    """Maps what a handler raised; None for what is unforeseen."""
    match error:
        case InvalidRequest():
            return _failure(error, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", field=error.field)
        case ChatTemplateError():
            field = f"chat.{error.field}" if error.field else "chat"
            return _failure(error, grpc.StatusCode.INVALID_ARGUMENT, "CHAT_TEMPLATE", field=field)
        case UnknownModel():
            resource = ("octavo.runner.v1/model", error.asked)
            return _failure(error, grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", resource=resource)
        case DuplicateRequest():
            return _failure(error, grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
        case QueueFull():
            return _failure(error, grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_seconds=error.retry_seconds)
        case SlowReader():
            return _failure(error, grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER")
        case Unauthenticated():
            return _failure(error, grpc.StatusCode.UNAUTHENTICATED, error.reason)
        case NotYours():
            return _failure(error, grpc.StatusCode.PERMISSION_DENIED, "NOT_YOURS", field=error.field)
        case EngineStopped():
            return _failure(error, grpc.StatusCode.UNAVAILABLE, "STOPPING")
        case NotReady():
            return _failure(error, grpc.StatusCode.UNAVAILABLE, "NOT_READY", retry_seconds=START_RETRY_SECONDS)
        case RequestRefused():
            return _failure(error, grpc.StatusCode.INVALID_ARGUMENT, "REFUSED_BY_KV_MANAGER")
        case PinsExhausted():
            return _failure(error, grpc.StatusCode.RESOURCE_EXHAUSTED, "PINS_EXHAUSTED", field="retention.pin_seconds")
        case FormStuck():
            return _failure(error, grpc.StatusCode.INVALID_ARGUMENT, "FORM_STUCK", field="structured_output")
        case FormsUnavailable():
            return _failure(error, grpc.StatusCode.UNIMPLEMENTED, "NO_STRUCTURED_OUTPUT")
        case TooFarBehind():
            return _failure(error, grpc.StatusCode.OUT_OF_RANGE, "TOO_FAR_BEHIND")
        case Unsupported():
            return _failure(error, grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")
        case RequestFailed():
            return _failure(error, grpc.StatusCode.INTERNAL, "ENGINE_FAILED")
        case _:
            return None


def _failure(error: BaseException, code: grpc.StatusCode, reason: str, **details: object) -> RpcFailure:
    return RpcFailure(code=code, sentence=str(error), reason=reason, domain=RUNNER_DOMAIN, **details)  # type: ignore[arg-type]
