"""Refusing a request that can't be served as asked, with a sentence that says what to change."""

from __future__ import annotations

from dataclasses import dataclass

from model_runner.invalid import (
    InvalidRequest,
    are_tokens,
    check_bytes,
    check_count,
    check_printable,
    check_range,
    check_token_ids,
    utf8_size,
)
from model_runner.request import (
    MAX_CHOICES,
    MAX_FORM_BYTES,
    MAX_FORM_CHOICES,
    MAX_LOGPROBS,
    MAX_PIN_SECONDS,
    MAX_PRIORITY,
    MAX_QUEUE_PRIORITY,
    MAX_REQUEST_ID_BYTES,
    MAX_SALT_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TENANT_BYTES,
    NO_RETENTION,
    GenerateRequest,
    StopConditions,
    StructuredOutput,
    StructureKind,
)
from model_runner.validation_sampling import check_sampling
from model_runner.validation_several import check_several

_NORMALISATION_SLACK = 4
MAX_MIN_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model, the pool and the scheduler can hold.

    Tokens in the vocabulary and in one sequence's K/V; choices of one request, which all run at once.
    """

    vocab_size: int
    max_sequence_tokens: int
    max_choices: int = MAX_CHOICES


def check_text_size(field: str, text: str, longest_token_bytes: int, limits: Limits) -> None:
    """Refuses a text that must have too many tokens, before anybody spends time and memory on finding out how many.

    Tokenizers may shorten a text before they cut it, hence the slack. Raises InvalidRequest.
    """
    size, most = utf8_size(text), _NORMALISATION_SLACK * longest_token_bytes * limits.max_sequence_tokens
    if size > most:
        raise InvalidRequest(
            field,
            f"The text has {size} bytes, and a sequence here holds at most {limits.max_sequence_tokens} tokens, which "
            f"no text above {most} bytes fits; shorten it.",
        )


def validate(request: GenerateRequest, limits: Limits) -> None:
    """Returns for a request that can run. Raises InvalidRequest for the first thing wrong with it."""
    _check_request_id(request.request_id)
    _check_prompt(request.prompt_token_ids, limits)
    check_sampling(request.sampling, limits.vocab_size)
    _check_stop(request.stop, limits)
    check_several(request, limits.max_choices)
    for field in ("logprobs", "prompt_logprobs"):
        if getattr(request, field) is not None:
            check_range(field, getattr(request, field), 0, MAX_LOGPROBS)
    check_bytes("cache_salt", request.cache_salt, MAX_SALT_BYTES)
    _check_retention(request)
    check_bytes("tenant", request.tenant, MAX_TENANT_BYTES)
    check_printable("tenant", request.tenant)
    if request.structured_output is not None:
        _check_form(request.structured_output)
    check_range("queue_priority", request.queue_priority, -MAX_QUEUE_PRIORITY, MAX_QUEUE_PRIORITY)


def _check_request_id(request_id: str) -> None:
    if not request_id:
        raise InvalidRequest("request_id", "request_id is empty; give the request a name of 1 byte or more.")
    check_bytes("request_id", request_id, MAX_REQUEST_ID_BYTES)
    # The books refuse such ids too, since they show them to people.
    check_printable("request_id", request_id)


def _check_retention(request: GenerateRequest) -> None:
    retention = request.retention
    check_range("priority", retention.priority, 0, MAX_PRIORITY)
    check_range("pin_seconds", retention.pin_seconds, 0, MAX_PIN_SECONDS, hint=" (a week)")
    if request.skip_cache_write and retention != NO_RETENTION:
        raise InvalidRequest(
            "skip_cache_write",
            f"skip_cache_write leaves nothing in the cache that priority {retention.priority} or a pin of "
            f"{retention.pin_seconds:g} seconds could keep; leave one or the other out.",
        )


def _check_prompt(token_ids: tuple[int, ...], limits: Limits) -> None:
    if not token_ids:
        raise InvalidRequest("prompt_token_ids", "The prompt is empty; send at least 1 token.")
    # A full-length prompt runs: the token generated last needs no K/V.
    if len(token_ids) > limits.max_sequence_tokens:
        raise InvalidRequest(
            "prompt_token_ids",
            f"The prompt has {len(token_ids)} tokens, and a sequence here holds at most {limits.max_sequence_tokens}; "
            f"shorten the prompt by {len(token_ids) - limits.max_sequence_tokens} or more.",
        )
    if are_tokens(token_ids, limits.vocab_size):
        return
    index, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
    raise InvalidRequest(
        "prompt_token_ids",
        f"Prompt token {index} (counted from 0) is {token}; this model's token ids go from 0 to "
        f"{limits.vocab_size - 1}.",
    )


def _check_stop(stop: StopConditions, limits: Limits) -> None:
    if stop.max_tokens is not None and stop.max_tokens < 1:
        raise InvalidRequest(
            "max_tokens",
            f"max_tokens is {stop.max_tokens}; ask for at least 1, or leave it out for as many as fit.",
        )
    check_count("stop_strings", len(stop.stop_strings), MAX_STOP_STRINGS)
    for index, stop_string in enumerate(stop.stop_strings):
        _check_stop_string(index, stop_string)
    check_count("stop_token_ids", len(stop.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids("stop_token_ids", stop.stop_token_ids, limits.vocab_size)
    most = MAX_MIN_TOKENS if stop.max_tokens is None else stop.max_tokens
    check_range("min_tokens", stop.min_tokens, 0, most, hint="" if stop.max_tokens is None else ", which is max_tokens")


def _check_stop_string(index: int, stop_string: str) -> None:
    if not stop_string:
        raise InvalidRequest(
            "stop_strings", f"Stop string {index} (counted from 0) is empty; leave it out or give it 1 byte or more."
        )
    size = utf8_size(stop_string)
    if size > MAX_STOP_STRING_BYTES:
        raise InvalidRequest(
            "stop_strings",
            f"Stop string {index} (counted from 0) has {size} bytes in UTF-8; the most is {MAX_STOP_STRING_BYTES}.",
        )


def _check_form(form: StructuredOutput) -> None:
    """What can be told without compiling it."""
    field = f"structured_output.{form.kind.value}"
    size = sum(map(utf8_size, form.texts))
    if size > MAX_FORM_BYTES:
        raise InvalidRequest(field, f"{field} has {size} bytes in UTF-8; the most is {MAX_FORM_BYTES}.")
    if form.kind is not StructureKind.CHOICES:
        return
    check_count(field, len(form.texts), MAX_FORM_CHOICES)
    if not form.texts:
        raise InvalidRequest(field, "There is no choice; give at least 1.")
    if "" in form.texts:
        raise InvalidRequest(field, f"Choice {form.texts.index('')} (counted from 0) is empty; leave it out.")
