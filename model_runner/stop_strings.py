"""Finding the first of several stop strings in text that arrives in pieces, by an Aho-Corasick automaton."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """An immutable automaton for a set of stop strings; any number of searches share one.

    A node stands for a beginning of some stop string, node 0 for the empty one. `depths` are in characters.
    """

    __slots__ = ("_edges", "_fallbacks", "depths", "matches")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """Takes time and space linear in the total length. Raises ValueError for an empty stop string."""
        if not all(stop_strings):
            raise ValueError("a stop string is empty; every text would stop at once")
        self._edges: list[dict[str, int]] = [{}]
        self.depths = [0]
        # The longest stop string that ends where the node does: it begins the earliest.
        self.matches: list[str | None] = [None]
        for stop_string in stop_strings:
            self._insert(stop_string)
        self._fallbacks = [0] * len(self._edges)
        self._link()

    def step(self, node: int, character: str) -> int:
        """The node of the longest beginning of a stop string that the text ends in after one more character."""
        while character not in self._edges[node]:
            if node == 0:
                return 0
            node = self._fallbacks[node]
        return self._edges[node][character]

    def _insert(self, stop_string: str) -> None:
        node = 0
        for character in stop_string:
            node = self._edges[node].get(character) or self._grow(node, character)
        self.matches[node] = stop_string

    def _grow(self, parent: int, character: str) -> int:
        child = len(self._edges)
        self._edges[parent][character] = child
        self._edges.append({})
        self.depths.append(self.depths[parent] + 1)
        self.matches.append(None)
        return child

    def _link(self) -> None:
        """Gives each node its fallback, the longest proper end of it that is a node too, breadth first."""
        queue = deque(self._edges[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._edges[node].items():
                self._fallbacks[child] = self.step(self._fallbacks[node], character)
                queue.append(child)
            if self.matches[node] is None:
                self.matches[node] = self.matches[self._fallbacks[node]]


@lru_cache(maxsize=4)
def compiled(stop_strings: tuple[str, ...]) -> StopStrings:
    """The automaton, shared by the choices of a request, which are set up one after the other."""
    return StopStrings(stop_strings)


class StopSearch:
    """Searches one text. Lets text through as soon as no stop string can begin in it.

    The stop string that begins first wins; of those that begin together, the one that ends first.
    `found` is the stop string once that is decided; from then on nothing comes through. The text ends before it, or
    after it with `include`.
    """

    __slots__ = ("_candidate", "_candidate_start", "_held", "_include", "_node", "_stop_strings", "found")

    def __init__(self, stop_strings: Sequence[str], *, include: bool = False) -> None:
        self._stop_strings = compiled(tuple(stop_strings)) if stop_strings else None
        self._include = include
        self._node = 0
        self._held = ""
        self._candidate: str | None = None
        self._candidate_start = 0  # in characters from the start of the held text
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Adds text; returns what is now certain to come before any stop string. O(1) per character, amortised."""
        if self._stop_strings is None:
            return text
        if self.found is not None:
            return ""
        scanned = len(self._held)
        self._held += text
        for position, character in enumerate(text, start=scanned + 1):
            if self._advance(self._stop_strings, character, position):
                return self.finish()
        return self._release(len(self._held) - self._stop_strings.depths[self._node])

    def finish(self) -> str:
        """Ends the text: returns what was held back, cut at the stop string if one is complete."""
        if self._candidate is None:
            return self._release(len(self._held))
        self.found = self._candidate
        end = self._candidate_start + (len(self._candidate) if self._include else 0)
        released, self._held = self._held[:end], ""
        self._candidate = None
        return released

    def _advance(self, stop_strings: StopStrings, character: str, position: int) -> bool:
        """Takes the character that ends at `position` of the held text; True when the stop string is decided."""
        self._node = stop_strings.step(self._node, character)
        match = stop_strings.matches[self._node]
        if match is not None and (self._candidate is None or position - len(match) < self._candidate_start):
            self._candidate, self._candidate_start = match, position - len(match)
        # Only a stop string still under way, and begun earlier, could yet beat the candidate.
        return self._candidate is not None and position - stop_strings.depths[self._node] >= self._candidate_start

    def _release(self, length: int) -> str:
        released, self._held = self._held[:length], self._held[length:]
        self._candidate_start -= length
        return released
