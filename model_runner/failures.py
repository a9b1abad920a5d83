"""Why the engine gives requests up: what a refusal of the KV manager is to a client, and sentences for clients."""

from __future__ import annotations

from model_runner.books import INVALID_ARGUMENT, NEVER_FITS, PINS_EXHAUSTED, SEQUENCE_EXISTS, BooksRefused
from model_runner.engine_types import FailureKind
from model_runner.sequence import LiveRequest

_KINDS = {
    SEQUENCE_EXISTS: FailureKind.NAME_TAKEN,
    INVALID_ARGUMENT: FailureKind.REQUEST,
    NEVER_FITS: FailureKind.REQUEST,
    PINS_EXHAUSTED: FailureKind.PINS_EXHAUSTED,
}


def refusal_kind(error: BooksRefused) -> FailureKind:
    """What a refusal of the KV manager is to the client, by its reason; one that is not known is a fault of ours."""
    return _KINDS.get(error.reason, FailureKind.ENGINE)


def stop_sentence(live: LiveRequest) -> str:
    """For the client of a request that a stop of the server ends."""
    if live.output_tokens:
        return f"the server stops, after {live.output_tokens} tokens of the answer"
    return "the server stops, and has not begun with the answer; send the request to another one"
