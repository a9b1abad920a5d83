"""A consumer of index events: it replays them into a tree of its own, and refuses a story that makes no sense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvmanager.events import EventKind, IndexEvent
from tests.kvmanager.naive_books import NaivePrompt, Slot


@dataclass(frozen=True)
class KnownBlock:
    """What a name stands for, learnt when it was committed."""

    slots: tuple[Slot, ...]
    salt: str
    adapter: tuple[str, str]
    tokens: tuple[int, ...]
    has_spans: bool


class IndexWatcher:
    """parents: the names that can be found now, each with the one before it. pins and priorities: by name."""

    def __init__(self) -> None:
        self.last = 0
        self.parents: dict[bytes, bytes] = {}
        self.known: dict[bytes, KnownBlock] = {}
        self.pins: dict[bytes, float] = {}
        self.priorities: dict[bytes, int] = {}
        self.promised: set[bytes] = set()
        """Of the names, those that the step at hand is yet to compute."""

    def learn(self, prompt: NaivePrompt, names: Sequence[bytes]) -> None:
        """The full blocks of a prompt, by name."""
        scope = prompt.scope
        adapter = (scope.adapter_id, scope.adapter_version)
        for index, name in enumerate(names):
            tokens = tuple(prompt.tokens[index * prompt.size : (index + 1) * prompt.size])
            has_spans = any(prompt.keys(before) for before in range(index + 1))
            self.known[name] = KnownBlock(tuple(prompt.slots(index)), scope.salt, adapter, tokens, has_spans)

    def replay(self, events: Sequence[IndexEvent], on_removed: Callable[[bytes], None] | None = None) -> int:
        """Returns how many names were removed; `on_removed` is called before each."""
        removed = 0
        for event in events:
            self.last += 1
            assert event.number == self.last
            if event.kind is EventKind.STORED:
                self._store(event)
            elif event.kind is EventKind.CLEARED:
                self.parents.clear()
                self.pins.clear()
                self.priorities.clear()
            else:
                assert event.names, "an event of nothing"
                for name in event.names:
                    assert name in self.parents, "a name was removed that nobody had stored"
                    assert not self.children(name), "a name was removed before those that continue it"
                    if on_removed is not None:
                        on_removed(name)
                    removed += 1
                    del self.parents[name]
                    self.pins.pop(name, None)
                    self.priorities.pop(name, None)
        return removed

    def _store(self, event: IndexEvent) -> None:
        assert event.names, "an event of nothing"
        parent = event.parent
        for name in event.names:
            assert name not in self.parents, "a name was stored twice"
            assert not parent or parent in self.parents, "a name was stored before its parent"
            assert name in self.known, "a name that no committed block has"
            assert self.known[name].adapter == (event.adapter_id, event.adapter_version)
            self.parents[name] = parent
            parent = name

    def children(self, name: bytes) -> int:
        return sum(1 for parent in self.parents.values() if parent == name)

    def leaves(self) -> list[bytes]:
        continued = set(self.parents.values())
        return [name for name in self.parents if name not in continued]

    def pinned(self, now: float) -> set[bytes]:
        return {name for name, until in self.pins.items() if until > now}

    def longest(self, prompt: NaivePrompt, max_tokens: int) -> int:
        """Tokens that the prompt's beginning has in common with anything that can be found.

        What is promised is found by whole blocks only.
        """
        findable = {slot for name in self.parents for slot in self.known[name].slots}
        computed = {slot for name in set(self.parents) - self.promised for slot in self.known[name].slots}
        slots = [slot for index in range(-(-max_tokens // prompt.size)) for slot in prompt.slots(index)]
        length = 0
        while length < max_tokens and slots[length] in findable:
            length += 1
        length -= length % prompt.size
        while length < max_tokens and slots[length] in computed:
            length += 1
        return length

    def family(self, path: Sequence[bytes]) -> list[bytes]:
        """Names of a path, and all that continue its last."""
        found = [path[-1]]
        for name in found:
            found += [child for child, parent in self.parents.items() if parent == name]
        return [*path[:-1], *found]
