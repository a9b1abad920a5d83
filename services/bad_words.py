"""Words that an answer must not have, as the tokens that the model would write them with."""

from __future__ import annotations

from collections.abc import Sequence

from model_runner.invalid import InvalidRequest
from model_runner.tokenizer import Tokenizer
from model_runner.validation_sampling import check_bad_words

FIELD = "sampling.bad_words"


def tokenised_words(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens at the beginning of a text, and those after a space where they are others.

    Raises InvalidRequest for too many words, or one that is empty or too long.
    """
    try:
        check_bad_words(words)
    except InvalidRequest as error:
        raise InvalidRequest(FIELD, str(error)) from None
    spellings = [spelling for word in words for spelling in _spellings(word)]
    tokens = (tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in spellings)
    # A tokenizer may drop what it has no token for.
    return tuple(dict.fromkeys(each for each in tokens if each))


def _spellings(word: str) -> tuple[str, ...]:
    return (word,) if word.startswith(" ") else (word, f" {word}")
