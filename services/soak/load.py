"""The load: what each user asks for, one request after the other, out of nothing but the seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from random import Random

MAX_TOKENS = 64
"""Of an answer, at most; the undisturbed run computes so many for each prompt."""

SEARCH_WIDTH = 3
SEARCH_TOKENS = 12
"""Of every beam search, whose answers depend on both."""
MOST_DRAWN = 4
"""Answers that are drawn to give the best of them."""

_RULES = "You are a careful assistant. You answer in short sentences, and you say so when you do not know something. "
_LIBRARY = (
    "The library is open from nine to six on weekdays and from ten to two on Saturdays. Books may be kept for four "
    "weeks, films for one. Who is late pays ten cents a day for each. A card costs nothing for those who live in town. "
)
_STEMS = ("", _RULES, _RULES + _LIBRARY)
_TAILS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "Water boils at",
    "The first thing to know about gravity is that",
    "A good recipe for bread begins with",
    "def fibonacci(n):",
    "In the year 1969,",
    "My favourite animal is the",
)
PROMPTS = tuple(stem + tail for stem in _STEMS for tail in _TAILS)
"""All prompts. Many begin alike, so that their blocks are shared and found again."""


class Kind(Enum):
    """How the answers are made. Those of a search, and the best of several, come at the end, all at once."""

    SAMPLED = "sampled"
    BEST_OF = "best of"
    BEAMS = "beams"


class Ending(Enum):
    """What becomes of a request, if its user gets his way."""

    COMPLETE = "complete"
    ABORT = "abort"
    DROP = "drop"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of one user.

    drawn: answers of which the best `choices` are given; 0 when that is not asked. after: tokens until it is aborted or
    dropped. patience: of one whose answers come at the end, the seconds until then instead. seconds: its deadline.
    pause: seconds that the user waits before it. 0 is none.
    """

    name: str
    prompt: int
    max_tokens: int
    choices: int
    salt: str
    priority: int
    ending: Ending
    after: int
    seconds: float
    pause: float
    kind: Kind = Kind.SAMPLED
    drawn: int = 0
    patience: float = 0.0


def requests_of(seed: int, user: str) -> Iterator[Request]:
    """What a user asks for, without end. The same seed and user: the same requests."""
    rng = Random(f"load {seed} {user}")
    number = 0
    while True:
        number += 1
        yield _request(f"{user}-{number}", rng)


def _request(name: str, rng: Random) -> Request:
    ending = rng.choices(list(Ending), weights=(70, 10, 10, 10))[0]
    kind = rng.choices(list(Kind), weights=(70, 15, 15))[0]
    max_tokens = SEARCH_TOKENS if kind is Kind.BEAMS else rng.randint(4, MAX_TOKENS)
    choices = rng.choice((1, 1, 1, 2, 3))
    leaves = ending in (Ending.ABORT, Ending.DROP)
    return Request(
        name=name,
        prompt=rng.randrange(len(PROMPTS)),
        max_tokens=max_tokens,
        choices=choices,
        salt=rng.choice(("", "", "red", "blue")),
        priority=rng.choice((0, 0, 50, 100)),
        ending=ending,
        after=rng.randint(1, max_tokens) if leaves and kind is Kind.SAMPLED else 0,
        seconds=rng.uniform(0.05, 3.0) if ending is Ending.DEADLINE else 0.0,
        pause=rng.uniform(0.0, 0.5),
        kind=kind,
        drawn=rng.randint(choices + 1, MOST_DRAWN) if kind is Kind.BEST_OF else 0,
        patience=rng.uniform(0.05, 2.0) if leaves and kind is not Kind.SAMPLED else 0.0,
    )
