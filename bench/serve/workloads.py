"""What every system is given: conversations of token ids, each with its time of arrival.

A 64 requests at once. B 32 requests at once that share a prefix. C one stream. D requests that arrive over time, in a
small KV cache. E chats of several turns. A, B and C are recorded token ids; D and E are cut from the same text by a
seeded draw, so that all systems and all rounds get the same. This module also runs in the peers' environments: the
standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

RECORDED = Path(__file__).parents[1] / "data" / "workloads.json"
TRACE = Path(__file__).parents[2] / "tests" / "data" / "mooncake_conversation_trace.jsonl"

MAX_MODEL_LEN = 1024
"""Tokens of a prompt and its answer, at most: what the peers are started with."""
TRACE_REQUESTS = 200
TRACE_SECONDS = 20
"""Within which the requests of D arrive, on average: faster than any of the systems serves them on two cores, so that
somebody waits for room in the cache all along."""
PROMPT_DIVISOR, OUTPUT_DIVISOR = 64, 6
"""The trace's lengths are those of a much larger machine: D has its distribution, in small."""
SMALL_CACHE_TOKENS = 4096
"""K/V that D has room for: about 18 of its requests at a time, of those that would run in a larger cache."""
CHATS, CHAT_TURNS = 16, 4
CHAT_SYSTEM_TOKENS, CHAT_FIRST_TOKENS, CHAT_ANSWER_TOKENS = 128, 128, 32
CHAT_USER_TOKENS = (24, 72)
"""Tokens of a later user message: at least, at most."""


@dataclass(frozen=True, slots=True)
class Turn:
    """New prompt tokens, which follow the conversation so far, and how many tokens are generated after them."""

    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, each asked as soon as the one before is answered. arrival: seconds since the workload began."""

    turns: tuple[Turn, ...]
    arrival: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """cache_tokens: tokens of K/V that a system may hold; 0: as many as it has by its own settings."""

    name: str
    conversations: tuple[Conversation, ...]
    cache_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        """Tokens that all answers have together."""
        return sum(turn.max_tokens for each in self.conversations for turn in each.turns)

    def cut(self, conversations: int) -> Workload:
        """The first conversations alone; 0: all."""
        return replace(self, conversations=self.conversations[: conversations or None])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Workload:
        """What to_json() gave, from a pipe."""
        return Workload(
            found["name"],
            tuple(
                Conversation(
                    tuple(Turn(tuple(turn["prompt"]), turn["max_tokens"]) for turn in each["turns"]), each["arrival"]
                )
                for each in found["conversations"]
            ),
            found["cache_tokens"],
        )


def warm_up() -> Workload:
    """A few short requests that share nothing with the workloads, for before a run."""
    return Workload("warm-up", tuple(Conversation((Turn(tuple(range(first, first + 40)), 8),)) for first in (300, 400)))


def build(name: str) -> Workload:
    """The workload of this name. Raises KeyError for another."""
    return _BUILDERS[name]()


def _recorded(name: str) -> Workload:
    """All prompts of a recorded workload, at once."""
    found = json.loads(RECORDED.read_text())[name]
    return Workload(name, tuple(Conversation((Turn(tuple(each), found["max_tokens"]),)) for each in found["prompts"]))


def _traced() -> Workload:
    """Requests with a trace's lengths, divided and cut, that arrive at random and share no prefix on purpose."""
    rng = Random("D")
    lines = [json.loads(line) for line in TRACE.read_text().splitlines() if line]
    text = _text()
    arrivals = accumulate(rng.expovariate(TRACE_REQUESTS / TRACE_SECONDS) for _ in range(TRACE_REQUESTS))
    return Workload(
        "D",
        tuple(
            Conversation((_traced_turn(line, text, rng),), arrival)
            for line, arrival in zip(rng.sample(lines, TRACE_REQUESTS), arrivals, strict=True)
        ),
        SMALL_CACHE_TOKENS,
    )


def _traced_turn(line: dict[str, Any], text: Sequence[int], rng: Random) -> Turn:
    max_tokens = min(MAX_MODEL_LEN // 2, max(1, round(line["output_length"] / OUTPUT_DIVISOR)))
    prompt_tokens = min(MAX_MODEL_LEN - max_tokens, max(1, round(line["input_length"] / PROMPT_DIVISOR)))
    return Turn(_slice(text, prompt_tokens, rng), max_tokens)


def _chats() -> Workload:
    """Chats with one system prompt."""
    rng, text = Random("E"), _text()
    system = _slice(text, CHAT_SYSTEM_TOKENS, rng)
    return Workload("E", tuple(Conversation(_chat(system, text, rng)) for _ in range(CHATS)))


def _chat(system: tuple[int, ...], text: Sequence[int], rng: Random) -> tuple[Turn, ...]:
    first = Turn(system + _slice(text, CHAT_FIRST_TOKENS, rng), CHAT_ANSWER_TOKENS)
    later = [Turn(_slice(text, rng.randint(*CHAT_USER_TOKENS), rng), CHAT_ANSWER_TOKENS) for _ in range(CHAT_TURNS - 1)]
    return (first, *later)


def _text() -> list[int]:
    """Token ids of real sentences, end to end."""
    return [token_id for prompt in json.loads(RECORDED.read_text())["A"]["prompts"] for token_id in prompt]


def _slice(text: Sequence[int], length: int, rng: Random) -> tuple[int, ...]:
    start = rng.randrange(len(text) - length)
    return tuple(text[start : start + length])


_BUILDERS: dict[str, Callable[[], Workload]] = {
    "A": lambda: _recorded("A"),
    "B": lambda: _recorded("B"),
    "C": lambda: _recorded("C"),
    "D": _traced,
    "E": _chats,
}
NAMES = tuple(_BUILDERS)
