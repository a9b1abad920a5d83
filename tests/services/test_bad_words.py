"""Bad words as tokens, of a tokenizer that is a few lines."""

from __future__ import annotations

from typing import cast

import pytest

from model_runner.invalid import InvalidRequest
from model_runner.tokenizer import Tokenizer
from services.bad_words import tokenised_words


class Letters:
    """Each letter is its code; a full stop is nothing."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text if letter != "."]


LETTERS = cast(Tokenizer, Letters())


def test_at_the_beginning_and_after_a_space() -> None:
    assert tokenised_words(LETTERS, ["ab", " c"]) == ((97, 98), (32, 97, 98), (32, 99))


def test_what_has_no_tokens_is_left_out_and_nothing_comes_twice() -> None:
    assert tokenised_words(LETTERS, ["..", " .", "x", "x."]) == ((32,), (120,), (32, 120))


def test_no_words() -> None:
    assert tokenised_words(LETTERS, []) == ()


def test_the_field_is_that_of_the_message() -> None:
    with pytest.raises(InvalidRequest, match="Bad word 1") as caught:
        tokenised_words(LETTERS, ["a", ""])
    assert caught.value.field == "sampling.bad_words"
