"""What a mirror tells about the tokens of its sequences to who must know them in another thread."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.session.cached_tree import CachedBlock


class SequenceTap(Protocol):
    """Told by the engine's thread; must be quick and must not raise. A handle is never given again."""

    def begin(self, handle: int, salt: str, tokens: array[int]) -> None:
        """A sequence begins with these tokens, which are the caller's."""
        ...

    def tell(self, handle: int, start: int, tokens: array[int]) -> None:
        """It goes on with these tokens, of which the first is at `start`."""
        ...

    def cut(self, handle: int, num_tokens: int) -> None:
        """It goes back to its first tokens."""
        ...

    def end(self, handle: int) -> None:
        """It has ended; what is cached of it stays cached."""
        ...


class Told(NamedTuple):
    """One thing that a tap was told. tokens None: cut to `start` tokens, or ended when that is negative.

    salt is that of a sequence that begins, and None for one that goes on.
    """

    handle: int
    start: int
    tokens: array[int] | None
    salt: str | None = None


_ENDED = -1


class SequenceLog:
    """A SequenceTap that keeps what it was told until another thread takes it."""

    def __init__(self) -> None:
        self._told: deque[Told] = deque()

    def begin(self, handle: int, salt: str, tokens: array[int]) -> None:
        self._told.append(Told(handle, 0, tokens[:], salt))

    def tell(self, handle: int, start: int, tokens: array[int]) -> None:
        self._told.append(Told(handle, start, tokens))

    def cut(self, handle: int, num_tokens: int) -> None:
        self._told.append(Told(handle, num_tokens, None))

    def end(self, handle: int) -> None:
        self._told.append(Told(handle, _ENDED, None))

    def take(self) -> list[Told]:
        """What was told since the last call, in order."""
        return [self._told.popleft() for _ in range(len(self._told))]


@dataclass(frozen=True, slots=True)
class Glance:
    """What a runner holds. sequences: handle, salt, tokens and block table of each; cached: idle blocks by id."""

    sequences: list[tuple[int, str, array[int], list[int]]]
    cached: dict[int, CachedBlock]
