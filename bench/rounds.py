"""What both sides of bench.books share: the sizes, the prompts, the clock, and how a case is run round by round.

It also runs in vLLM's environment: the standard library only.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from time import thread_time_ns
from typing import Protocol, TypeVar

BLOCK_SIZE = 16
"""Tokens in a block."""

Figures = dict[str, float]
"""One round of one case, by line and in its unit: microseconds where nothing else is said."""

SHORT = {"blocks", "verbs"}
"""Cases of some hundred microseconds: a round runs three times, because the other side's turn cooled the caches."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured. All pools are in usable blocks.

    blocks: taken, freed or evicted at once. prompt_tokens: of the long prompt, which `pool` has room for, and which is
    forked to `children` there and in `large_pool`. warm_pool: the full one to evict from. sequences of about
    sequence_tokens take `steps` decode steps in a round.
    """

    blocks: int = 1_000
    warm_pool: int = 100_000
    pool: int = 10_000
    large_pool: int = 400_000
    prompt_tokens: int = 100_000
    children: int = 64
    sequences: int = 256
    sequence_tokens: int = 1_000
    steps: int = 16

    def divided(self, divisor: int) -> Sizes:
        """The same shape in small; the steps stay, so that every sequence still crosses a block boundary."""
        small = {name: max(1, size // divisor) for name, size in asdict(self).items()}
        return Sizes(**{**small, "steps": self.steps})


Case = Callable[[Sizes], Iterator[Figures]]
"""Sets up, then yields the figures of one round after another, for ever."""


class Side(Protocol):
    """One of the two that are compared."""

    def round(self, case: str) -> Figures:
        """The next round of a case; the first one after another case sets it up and warms up."""
        ...

    def close(self) -> None:
        """Ends this side."""
        ...


class LocalSide:
    """The cases of this process. The garbage collector is off, and what a case has set up is frozen."""

    def __init__(self, cases: Mapping[str, Case], sizes: Sizes) -> None:
        self._cases, self._sizes = cases, sizes
        self._name = ""
        self._rounds: Iterator[Figures] = iter(())

    def round(self, case: str) -> Figures:
        if case != self._name:
            self.close()
            gc.collect()
            gc.disable()
            self._name, self._rounds = case, self._cases[case](self._sizes)
            next(self._rounds)
            gc.freeze()
        for _ in range(2 if case in SHORT else 0):
            next(self._rounds)
        return next(self._rounds)

    def close(self) -> None:
        self._name, self._rounds = "", iter(())
        gc.unfreeze()
        gc.enable()


def timed(work: Callable[..., T], *arguments: object, **options: object) -> tuple[float, T]:
    """Microseconds of processor time that one call took, and its result.

    Both sides work in one thread and wait for nothing, so on an idle machine this is the time that passed; on a busy
    one it leaves out what others took.
    """
    start = thread_time_ns()
    result = work(*arguments, **options)
    return (thread_time_ns() - start) / 1_000, result


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids of a usual vocabulary; equal seeds give equal prompts, other seeds share no block."""
    return random.Random(seed).choices(range(49_152), k=num_tokens)
