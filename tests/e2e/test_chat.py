"""Conversations through the services: what the template makes of them, and what is cached from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from model_runner.request import Chunk
from services.client import Client
from tests.e2e.stack import Stack, running_stack

BLOCK = 16
SYSTEM = {"role": "system", "content": "You tell stories about rivers and boats. " * 12}
FIRST = {"role": "user", "content": "Tell me a long story about the Loire."}
SECOND = {"role": "user", "content": "And one about the Ebro."}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("chat")) as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    stack.reset_cache()
    with stack.client() as client:
        yield client
    stack.assert_nothing_held()


def cached_of(chunks: list[Chunk]) -> int:
    assert chunks[-1].usage is not None
    return chunks[-1].usage.cached_tokens


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def common_tokens(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def test_the_system_prompt_is_cached_and_hit(client: Client) -> None:
    one, other = [SYSTEM, FIRST], [SYSTEM, SECOND]
    shared = common_tokens(client.tokenize(chat=one), client.tokenize(chat=other))
    assert shared > 80
    assert cached_of(list(client.generate(chat=one, max_tokens=4))) == 0
    assert cached_of(list(client.generate(chat=other, max_tokens=4))) == shared // BLOCK * BLOCK


def test_the_second_turn_hits_the_first_with_its_answer(client: Client) -> None:
    turn: list[dict[str, Any]] = [SYSTEM, FIRST]
    asked = client.tokenize(chat=turn)
    chunks = list(client.generate(chat=turn, max_tokens=60))
    assert cached_of(chunks) == 0
    text = "".join(chunk.text for chunk in chunks)
    answered = client.tokenize(chat=[*turn, {"role": "assistant", "content": text}, SECOND])
    # The token that was drawn last was never computed. Beyond the answer, or where its text is cut into other tokens,
    # nothing is known.
    known = common_tokens((asked + tokens_of(chunks))[:-1], answered)
    assert known >= len(asked) + 2 * BLOCK
    second = list(client.generate(chat=[*turn, {"role": "assistant", "content": text}, SECOND], max_tokens=4))
    assert cached_of(second) == known // BLOCK * BLOCK


def test_an_answer_that_goes_on(client: Client) -> None:
    """Cut and continued, it is the answer in one piece, and nothing but the last block is computed again."""
    turn: list[dict[str, Any]] = [SYSTEM, FIRST]
    whole = list(client.generate(chat=turn, max_tokens=40))
    begun = list(client.generate(chat=turn, max_tokens=16))
    text = "".join(chunk.text for chunk in begun)
    messages = [*turn, {"role": "assistant", "content": text}]
    prompt = client.tokenize(chat=messages, continue_final_message=True)
    assert prompt == client.tokenize(chat=turn) + tokens_of(begun)
    rest = list(client.generate(chat=messages, continue_final_message=True, max_tokens=24))
    assert tokens_of(begun) + tokens_of(rest) == tokens_of(whole)
    assert cached_of(rest) == (len(prompt) - 1) // BLOCK * BLOCK
