"""What happens to the prefix index, as numbered events that a consumer can replay into a tree of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from itertools import islice
from typing import Final, NamedTuple

MAX_EVENTS: Final = 10_000
"""Events kept for replay; a consumer that is further behind takes a snapshot."""

MAX_KEPT_NAMES: Final = 1 << 16
"""Names in those events, some 4 MiB, whichever is reached first."""

MAX_NAMES: Final = 4096
"""Names in one event, 128 KiB: what a verb does to more is told in several."""


class EventKind(Enum):
    """STORED: names can be found now. REMOVED: they no longer can. CLEARED: none can."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"


_STORED: Final = EventKind.STORED
_REMOVED: Final = EventKind.REMOVED
"""Looking an enum's member up is slow in Python 3.11."""


class IndexEvent(NamedTuple):
    """One change of the index. Parents are stored before their children, and children removed before their parents.

    number: consecutive, from 1. names: of STORED, a chain, each the parent of the next; of REMOVED, one by one.
    parent: of the first stored name; empty when it begins a prompt. The adapter is that of the stored chain. No event
    has tokens or a salt: who can name both can compute the names, and nobody else learns anything from them.
    """

    number: int
    kind: EventKind
    names: tuple[bytes, ...] = ()
    parent: bytes = b""
    adapter_id: str = ""
    adapter_version: str = ""


class EventLog:
    """The latest events: `kept` of them at most, with `kept_names` names at most.

    `on_event` is called after each; it must not raise.
    """

    __slots__ = ("_events", "_kept", "_kept_names", "_last", "_names", "adapters", "on_event")

    def __init__(self, kept: int = MAX_EVENTS, kept_names: int = MAX_KEPT_NAMES) -> None:
        self._events: deque[IndexEvent] = deque()
        self._kept = kept
        self._kept_names = kept_names
        self._names = 0
        self._last = 0
        self.adapters: dict[bytes, tuple[str, str]] = {}
        """The adapter of each chain that has one, by its first name."""
        self.on_event: Callable[[], None] | None = None

    @property
    def last_number(self) -> int:
        """The number of the newest event; 0 before the first."""
        return self._last

    def stored(self, names: tuple[bytes, ...], parent: bytes, adapter_id: str, adapter_version: str) -> None:
        """`names` can be found from now on."""
        if adapter_id and not parent:
            self.adapters[names[0]] = (adapter_id, adapter_version)
        for some in _parts(names):
            self._add(IndexEvent(self._last + 1, _STORED, some, parent, adapter_id, adapter_version))
            parent = some[-1]

    def removed(self, names: tuple[bytes, ...]) -> None:
        """`names` can be found no more."""
        if self.adapters:
            for name in names:
                self.adapters.pop(name, None)
        for some in _parts(names):
            self._add(IndexEvent(self._last + 1, _REMOVED, some))

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self.adapters.clear()
        self._add(IndexEvent(self._last + 1, EventKind.CLEARED))

    def since(self, number: int) -> list[IndexEvent] | None:
        """The events from `number` on, oldest first; None when some of them are kept no more, or never were."""
        first = self._last - len(self._events) + 1
        if number < first or number > self._last + 1:
            return None
        return list(islice(self._events, number - first, None))

    def _add(self, event: IndexEvent) -> None:
        events = self._events
        events.append(event)
        self._last = event.number
        self._names += len(event.names)
        while len(events) > self._kept or self._names > self._kept_names:
            self._names -= len(events.popleft().names)
        if self.on_event is not None:
            self.on_event()


def _parts(names: tuple[bytes, ...]) -> list[tuple[bytes, ...]]:
    """The names of each event; nearly always those of one."""
    if len(names) <= MAX_NAMES:
        return [names] if names else []
    return [names[start : start + MAX_NAMES] for start in range(0, len(names), MAX_NAMES)]
