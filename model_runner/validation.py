"""Refusing a request that can't be served as asked, with a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from model_runner.request import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_PIN_SECONDS,
    MAX_PRIORITY,
    MAX_QUEUE_PRIORITY,
    MAX_REQUEST_ID_BYTES,
    MAX_SALT_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TENANT_BYTES,
    NO_RETENTION,
    GenerateRequest,
    SamplingParams,
    StopConditions,
)

MAX_TOP_K = 2**31 - 1
_NORMALISATION_SLACK = 4
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model, the pool and the scheduler can hold.

    Tokens in the vocabulary and in one sequence's K/V; choices of one request, which all run at once.
    """

    vocab_size: int
    max_sequence_tokens: int
    max_choices: int = MAX_CHOICES


class InvalidRequest(ValueError):
    """A request was refused. `field` is the name of the request's field at fault; the message is a sentence."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


def check_text_size(field: str, text: str, longest_token_bytes: int, limits: Limits) -> None:
    """Refuses a text that must have too many tokens, before anybody spends time and memory on finding out how many.

    Tokenizers may shorten a text before they cut it, hence the slack. Raises InvalidRequest.
    """
    size, most = _utf8_size(text), _NORMALISATION_SLACK * longest_token_bytes * limits.max_sequence_tokens
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
    _check_sampling(request.sampling)
    _check_stop(request.stop, limits)
    _check_range("num_choices", request.num_choices, 1, min(MAX_CHOICES, limits.max_choices))
    if request.logprobs is not None:
        _check_range("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    _check_bytes("cache_salt", request.cache_salt, MAX_SALT_BYTES)
    _check_retention(request)
    _check_bytes("tenant", request.tenant, MAX_TENANT_BYTES)
    _check_printable("tenant", request.tenant)
    _check_range("queue_priority", request.queue_priority, -MAX_QUEUE_PRIORITY, MAX_QUEUE_PRIORITY)


def _check_request_id(request_id: str) -> None:
    if not request_id:
        raise InvalidRequest("request_id", "request_id is empty; give the request a name of 1 byte or more.")
    _check_bytes("request_id", request_id, MAX_REQUEST_ID_BYTES)
    # The books refuse such ids too, since they show them to people.
    _check_printable("request_id", request_id)


def _check_retention(request: GenerateRequest) -> None:
    retention = request.retention
    _check_range("priority", retention.priority, 0, MAX_PRIORITY)
    _check_range("pin_seconds", retention.pin_seconds, 0, MAX_PIN_SECONDS, hint=" (a week)")
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
    if _in_vocabulary(token_ids, limits):
        return
    index, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < limits.vocab_size)
    raise InvalidRequest(
        "prompt_token_ids",
        f"Prompt token {index} (counted from 0) is {token}; this model's token ids go from 0 to "
        f"{limits.vocab_size - 1}.",
    )


def _check_sampling(sampling: SamplingParams) -> None:
    _check_range("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _check_range("top_k", sampling.top_k, 0, MAX_TOP_K, hint=" (0 for no filter)")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p", f"top_p is {sampling.top_p}; use a number above 0 and up to 1 (1 for no filter).")
    _check_range("min_p", sampling.min_p, 0, 1, hint=" (0 for no filter)")
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, MAX_SEED)


def _check_stop(stop: StopConditions, limits: Limits) -> None:
    if stop.max_tokens is not None and stop.max_tokens < 1:
        raise InvalidRequest(
            "max_tokens",
            f"max_tokens is {stop.max_tokens}; ask for at least 1, or leave it out for as many as fit.",
        )
    _check_count("stop_strings", len(stop.stop_strings), MAX_STOP_STRINGS)
    for index, stop_string in enumerate(stop.stop_strings):
        _check_stop_string(index, stop_string)
    _check_count("stop_token_ids", len(stop.stop_token_ids), MAX_STOP_TOKEN_IDS)
    if stop.stop_token_ids and not _in_vocabulary(stop.stop_token_ids, limits):
        token = min(each for each in stop.stop_token_ids if not 0 <= each < limits.vocab_size)
        raise InvalidRequest(
            "stop_token_ids",
            f"stop_token_ids has {token}; this model's token ids go from 0 to {limits.vocab_size - 1}.",
        )


def _check_stop_string(index: int, stop_string: str) -> None:
    if not stop_string:
        raise InvalidRequest(
            "stop_strings", f"Stop string {index} (counted from 0) is empty; leave it out or give it 1 byte or more."
        )
    size = _utf8_size(stop_string)
    if size > MAX_STOP_STRING_BYTES:
        raise InvalidRequest(
            "stop_strings",
            f"Stop string {index} (counted from 0) has {size} bytes in UTF-8; the most is {MAX_STOP_STRING_BYTES}.",
        )


def _in_vocabulary(token_ids: Collection[int], limits: Limits) -> bool:
    return min(token_ids) >= 0 and max(token_ids) < limits.vocab_size


def _check_range(field: str, value: float, least: float, most: float, hint: str = "") -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not least <= value <= most:
        raise InvalidRequest(field, f"{field} is {value}; use a number from {least} to {most}{hint}.")


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(field, f"{field} has {count} entries; the most is {most}.")


def _check_printable(field: str, text: str) -> None:
    odd = next((index for index, character in enumerate(text) if not character.isprintable()), None)
    if odd is not None:
        raise InvalidRequest(
            field,
            f"{field} has U+{ord(text[odd]):04X} at index {odd}, which cannot be printed; "
            "use printable characters only.",
        )


def _check_bytes(field: str, text: str, most: int) -> None:
    size = _utf8_size(text)
    if size > most:
        raise InvalidRequest(field, f"{field} has {size} bytes in UTF-8; the most is {most}.")


def _utf8_size(text: str) -> int:
    # Half a surrogate pair has no UTF-8; as a limit its 3 bytes will do.
    return len(text.encode("utf-8", "surrogatepass"))
