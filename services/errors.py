"""Errors at the edge: how a refusal becomes a gRPC status with google.rpc details, and how a client reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote

import grpc
import structlog
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from kvmanager import errors as kv

KV_DOMAIN = "octavo.kv.v1"
RUNNER_DOMAIN = "octavo.runner.v1"

DETAILS_KEY = "grpc-status-details-bin"
"""The trailer that carries google.rpc.Status."""

RETRY_SECONDS = 0.1
"""What RetryInfo advises when a pool is short of blocks: a few engine steps."""

_PLAIN = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")

# gRPC refuses trailers above 8 KiB, and the sentence travels twice.
_MAX_SENTENCE = 1024
_MAX_VALUE = 256


class StartupError(Exception):
    """A process cannot start, or a tool cannot do its work; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class RpcFailure:
    """A refused RPC as it goes on the wire: status code, sentence, and the facts of the google.rpc details.

    numbers: metadata of ErrorInfo. field: the request's field at fault, for BadRequest. retry_seconds: for RetryInfo.
    resource: type and name of what was not found, for ResourceInfo.
    """

    code: grpc.StatusCode
    sentence: str
    reason: str
    domain: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    field: str = ""
    retry_seconds: float | None = None
    resource: tuple[str, str] | None = None


ErrorMapping = Callable[[BaseException], RpcFailure | None]
"""Says what an exception means on the wire; None when it is unforeseen."""


class RpcErrorView(NamedTuple):
    """What a client reads from a failed call: code name, sentence, reason and numbers (empty when not sent)."""

    code: str
    sentence: str
    reason: str
    metadata: dict[str, str]


def kv_failure(error: BaseException) -> RpcFailure | None:
    """Maps an error of the KV manager; None for BrokenBooks and for what is no KvError."""
    match error:
        case kv.InvalidArgument():
            return _kv(error, grpc.StatusCode.INVALID_ARGUMENT, field=_field(error.numbers))
        case kv.PoolShort():
            return _kv(error, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_seconds=RETRY_SECONDS)
        case kv.PinsExhausted():
            return _kv(error, grpc.StatusCode.RESOURCE_EXHAUSTED)
        case kv.UnknownPool():
            return _kv(error, grpc.StatusCode.NOT_FOUND, resource=_resource(error, "pool"))
        case kv.UnknownSequence():
            return _kv(error, grpc.StatusCode.NOT_FOUND, resource=_resource(error, "sequence"))
        case kv.SequenceExists():
            return _kv(error, grpc.StatusCode.ALREADY_EXISTS)
        case kv.SessionTaken() | kv.SessionSilent():
            return _kv(error, grpc.StatusCode.ABORTED)
        case kv.KvManagerStopping():
            return _kv(error, grpc.StatusCode.UNAVAILABLE)
        case kv.PoolDiffers() | kv.StaleEpoch() | kv.PoolBusy() | kv.NotOwner():
            return _kv(error, grpc.StatusCode.FAILED_PRECONDITION)
        case _:
            return None


def unforeseen_failure(domain: str) -> RpcFailure:
    """What a client is told of a fault of the server itself; the traceback stays in the server's log."""
    return RpcFailure(
        code=grpc.StatusCode.INTERNAL,
        sentence="The server made a mistake while it answered; its log says more.",
        reason="INTERNAL",
        domain=domain,
    )


def malformed_failure(domain: str) -> RpcFailure:
    """What a client is told of bytes that are no message of the contract."""
    return RpcFailure(
        code=grpc.StatusCode.INVALID_ARGUMENT,
        sentence="The request is not a well-formed message of this method.",
        reason="MALFORMED_REQUEST",
        domain=domain,
    )


def unimplemented_failure(domain: str, method: str) -> RpcFailure:
    """What a client is told of a verb of the contract that this server does not have."""
    return RpcFailure(
        code=grpc.StatusCode.UNIMPLEMENTED,
        sentence=f"This server does not implement {method}.",
        reason="UNIMPLEMENTED",
        domain=domain,
        numbers={"method": method},
    )


def failure_of(error: BaseException, mapping: ErrorMapping, domain: str, method: str) -> RpcFailure:
    """The failure that an exception means; an unforeseen one is logged with its traceback and told as INTERNAL."""
    failure = mapping(error)
    if failure is not None:
        return failure
    structlog.get_logger().error("rpc failed unforeseen", method=method, exc_info=error)
    return unforeseen_failure(domain)


def to_status(failure: RpcFailure) -> status_pb2.Status:
    """The google.rpc.Status of a failure, with its details packed."""
    status = status_pb2.Status(code=failure.code.value[0], message=_shortened(failure.sentence, _MAX_SENTENCE))
    for detail in _details(failure):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


async def abort(context: grpc.aio.ServicerContext, failure: RpcFailure) -> NoReturn:
    """Ends an RPC of a grpc.aio server with the failure's status and details."""
    status = to_status(failure)
    await context.abort(failure.code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")


def describe_rpc_error(error: grpc.RpcError) -> RpcErrorView:
    """Reads a failed call of a grpc or grpc.aio client: code name, sentence, reason, numbers."""
    code: grpc.StatusCode = error.code()
    info = _error_info(rpc_error_details(error))
    return RpcErrorView(code.name, error.details() or code.value[1], info.reason, dict(info.metadata))


def view_of_status(status: status_pb2.Status) -> RpcErrorView:
    """Reads the status of a call that came without gRPC, as describe_rpc_error() reads a failed call."""
    code = next((each for each in grpc.StatusCode if each.value[0] == status.code), grpc.StatusCode.UNKNOWN)
    info = _error_info(map(_unpacked, status.details))
    return RpcErrorView(code.name, status.message or code.value[1], info.reason, dict(info.metadata))


def rpc_error_details(error: grpc.RpcError) -> list[Message]:
    """The google.rpc details of a failed call that this module knows, unpacked; empty when it has none."""
    trailer = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if trailer is None:
        return []
    packed = status_pb2.Status.FromString(trailer).details
    return [message for message in map(_unpacked, packed) if message is not None]


_KNOWN_DETAILS: tuple[type[Message], ...] = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.RetryInfo,
    error_details_pb2.ResourceInfo,
)


def _unpacked(packed: AnyMessage) -> Message | None:
    for kind in _KNOWN_DETAILS:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    return None


def _error_info(details: Iterable[Message | None]) -> error_details_pb2.ErrorInfo:
    found = (each for each in details if isinstance(each, error_details_pb2.ErrorInfo))
    return next(found, error_details_pb2.ErrorInfo())


def _kv(error: kv.KvError, code: grpc.StatusCode, **more: Any) -> RpcFailure:
    return RpcFailure(
        code=code, sentence=str(error), reason=error.reason, domain=KV_DOMAIN, numbers=error.numbers, **more
    )


# The request's field that a number of an InvalidArgument speaks of, the most telling first.
_FIELDS = {
    "num_blocks": "spec.num_blocks",
    "block_size": "spec.block_size",
    "bytes_per_block": "spec.bytes_per_block",
    "token_id": "token_ids",
    "computed_tokens": "computed_tokens",
    "offset": "spans",
    "spans": "spans",
    "quota_blocks": "max_blocks",
    "priority": "retention.priority",
    "pin_seconds": "retention.pin_seconds",
    # Only of a truncate, beside the tokens to keep.
    "known_tokens": "num_tokens",
    "num_tokens": "token_ids",
}


def _field(numbers: Mapping[str, str]) -> str:
    named = next((field for number, field in _FIELDS.items() if number in numbers), "")
    return numbers.get("field", named)


def _resource(error: kv.KvError, kind: str) -> tuple[str, str]:
    numbers = error.numbers
    return f"octavo.kv.v1/{kind}", numbers.get(f"{kind}_id", numbers.get(kind, ""))


def _details(failure: RpcFailure) -> list[Message]:
    numbers = {key: _shortened(value, _MAX_VALUE) for key, value in failure.numbers.items()}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=failure.reason, domain=failure.domain, metadata=numbers)
    ]
    if failure.field:
        details.append(_bad_request(failure))
    if failure.retry_seconds is not None:
        details.append(_retry_info(failure.retry_seconds))
    if failure.resource is not None:
        details.append(_resource_info(failure))
    return details


def _bad_request(failure: RpcFailure) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=failure.field, description=_shortened(failure.sentence, _MAX_SENTENCE)
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _retry_info(seconds: float) -> error_details_pb2.RetryInfo:
    info = error_details_pb2.RetryInfo()
    fraction, whole = math.modf(seconds)
    info.retry_delay.seconds = int(whole)
    info.retry_delay.nanos = int(fraction * 1e9)
    return info


def _resource_info(failure: RpcFailure) -> error_details_pb2.ResourceInfo:
    kind, name = failure.resource or ("", "")
    return error_details_pb2.ResourceInfo(
        resource_type=kind,
        resource_name=_shortened(name, _MAX_VALUE),
        description=_shortened(failure.sentence, _MAX_VALUE),
    )


def _shortened(text: str, most: int) -> str:
    """`text`, cut where it would take more than `most` bytes on the wire, where each byte beyond ASCII takes three."""
    if len(text) * 12 <= most or _wire_bytes(text) <= most:
        return text
    size = _wire_bytes("…")
    for index, character in enumerate(text):
        size += _wire_bytes(character)
        if size > most:
            return text[:index] + "…"
    return text


def _wire_bytes(text: str) -> int:
    """The size of a text in an HTTP/2 trailer, percent-encoded."""
    return len(quote(text, safe=_PLAIN))
