"""Refusing sampling parameters that make no sense: what validation.validate() knows of SamplingParams."""

from __future__ import annotations

from collections.abc import Sequence

from model_runner.invalid import InvalidRequest, check_count, check_range, check_token_ids, utf8_size
from model_runner.request import (
    MAX_ADDITIVE_PENALTY,
    MAX_BAD_WORD_BYTES,
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    SamplingParams,
)

MAX_TOP_K = 2**31 - 1
MAX_SEED = 2**64 - 1


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest for the first thing wrong with it."""
    check_range("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    check_range("top_k", sampling.top_k, 0, MAX_TOP_K, hint=" (0 for no filter)")
    if not 0 < sampling.top_p <= 1:
        raise InvalidRequest("top_p", f"top_p is {sampling.top_p}; use a number above 0 and up to 1 (1 for no filter).")
    check_range("min_p", sampling.min_p, 0, 1, hint=" (0 for no filter)")
    if sampling.seed is not None:
        check_range("seed", sampling.seed, 0, MAX_SEED)
    _check_penalties(sampling)
    _check_bias(sampling.logit_bias, vocab_size)
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids", "allowed_token_ids is empty; name 1 token or more, or leave it out to allow all."
            )
        check_token_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    for word in sampling.bad_words:
        if not word:
            raise InvalidRequest("bad_words", "A bad word has no tokens; leave it out.")
        check_token_ids("bad_words", word, vocab_size)


def check_bad_words(words: Sequence[str]) -> None:
    """Refuses words before anybody turns them into tokens. Raises InvalidRequest."""
    check_count("bad_words", len(words), MAX_BAD_WORDS)
    for index, word in enumerate(words):
        size = utf8_size(word)
        if not 1 <= size <= MAX_BAD_WORD_BYTES:
            raise InvalidRequest(
                "bad_words",
                f"Bad word {index} (counted from 0) has {size} bytes in UTF-8; give it 1 to {MAX_BAD_WORD_BYTES}.",
            )


def _check_penalties(sampling: SamplingParams) -> None:
    # Written so that NaN, which compares false with everything, is refused.
    if not 0 < sampling.repetition_penalty <= MAX_REPETITION_PENALTY:
        raise InvalidRequest(
            "repetition_penalty",
            f"repetition_penalty is {sampling.repetition_penalty}; use a number above 0 and up to "
            f"{MAX_REPETITION_PENALTY} (1 for no penalty).",
        )
    for field in ("presence_penalty", "frequency_penalty"):
        check_range(field, getattr(sampling, field), -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)


def _check_bias(bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    check_count("logit_bias", len(bias), MAX_BIASED_TOKENS)
    check_token_ids("logit_bias", [token_id for token_id, _ in bias], vocab_size)
    for token_id, value in bias:
        if not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                "logit_bias",
                f"The logit_bias of token {token_id} is {value}; use a number from {-MAX_LOGIT_BIAS} to "
                f"{MAX_LOGIT_BIAS}.",
            )
