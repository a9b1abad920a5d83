"""The changes of a runner's own prefix index with their tokens, from the KV manager's events: numbered, and replayed.

One watch serves all subscribers. Until the first one comes, nobody watches, and nothing is named.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import structlog
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.index_tokens import IndexTokens, NamedBlock
from services.runner_errors import TooFarBehind
from services.session.tap import Glance, SequenceLog, SequenceTap

KEPT_CHANGES = 4096
"""Changes that are kept for subscribers; who is further behind begins anew."""
RETRY_SECONDS = 0.5
"""Between two attempts to watch."""
NEWS_SECONDS = 1.0
"""Between two looks at what sequences have told, when there are no events."""
_NUMBERS_PER_SECOND = 1 << 20

log = structlog.get_logger(__name__)

Watch = Callable[[int, str], AsyncIterator[pb.WatchEventsResponse]]
"""The KV manager's events from a number of a boot id on; ends with grpc.RpcError."""

Listen = Callable[[SequenceTap], Glance | None]
"""Makes a tap be told of the runner's sequences, and says what they are so far; None when there can be none yet."""


class Stored(NamedTuple):
    """A block that can be found from now on."""

    name: bytes
    block: NamedBlock


class Removed(NamedTuple):
    """A block that can be found no more."""

    name: bytes
    salt: str


@dataclass(frozen=True, slots=True)
class Change:
    """What happened at once, in order: children are removed before their parents, parents stored before children."""

    number: int
    removed: Sequence[Removed] = ()
    stored: Sequence[Stored] = ()


class IndexRelay:
    """Belongs to the event loop. Numbers begin at the wall clock, so that no later process repeats an earlier one's."""

    def __init__(self, watch: Watch, listen: Listen, tokens: IndexTokens) -> None:
        self._watch = watch
        self._listen = listen
        self._tokens = tokens
        self._tap = SequenceLog()
        self._index: dict[bytes, NamedBlock] = {}
        """Blocks that can be found, parents first; those of which the tokens are not known are left out."""
        self._last = int(time.time()) * _NUMBERS_PER_SECOND
        self._changes: deque[Change] = deque(maxlen=KEPT_CHANGES)
        self._bells: set[asyncio.Event] = set()
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def last_number(self) -> int:
        """Of the newest change."""
        return self._last

    async def ready(self) -> None:
        """Returns once the index is known; the first call begins to watch. A fault of the watch is raised."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        known = asyncio.ensure_future(self._known.wait())
        try:
            await asyncio.wait({known, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            known.cancel()
        self._check()

    def snapshot(self, salt: str) -> list[Stored]:
        """All blocks of this salt that can be found now, parents first."""
        return [Stored(name, block) for name, block in self._index.items() if block.salt == salt]

    def since(self, number: int) -> list[Change]:
        """The changes from `number` on. Raises TooFarBehind, and what has ended the watch."""
        self._check()
        first = self._last - len(self._changes) + 1
        if not first <= number <= self._last + 1:
            raise TooFarBehind(
                f"Changes from number {number} on are asked for, and those from {first} to {self._last} are kept; "
                "begin anew from 0."
            )
        return [change for change in self._changes if change.number >= number]

    @contextmanager
    def bell(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever there is a new change."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield bell
        finally:
            self._bells.discard(bell)

    async def close(self) -> None:
        """Watches no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _check(self) -> None:
        if self._task is not None and self._task.done():
            self._task.result()

    async def _follow(self) -> None:
        glance = self._listen(self._tap)
        if glance is not None:
            # A full pool takes a moment; streams go on meanwhile.
            await asyncio.to_thread(self._tokens.seed, glance)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._hear())
            tasks.create_task(self._keep_up())

    async def _keep_up(self) -> None:
        """Takes news in that no event asks for: there may be none for long, or none at all."""
        while True:
            self._take_news()
            await asyncio.sleep(NEWS_SECONDS)

    def _take_news(self) -> None:
        self._tokens.take(self._tap.take())
        self._tokens.keep(self._index)

    async def _hear(self) -> None:
        number, boot_id = 0, ""
        parts: list[pb.BlocksStored] = []
        while True:
            try:
                async for event in self._watch(number, boot_id):
                    number, boot_id = event.number + 1, event.boot_id
                    self._take(event, parts)
            except grpc.RpcError as error:
                log.debug("the KV manager's events have ended", reason=str(error))
            # Half a snapshot is none.
            if parts:
                number, parts = 0, []
            await asyncio.sleep(RETRY_SECONDS)

    def _take(self, event: pb.WatchEventsResponse, parts: list[pb.BlocksStored]) -> None:
        # What is stored was told to the tap before it was told to the KV manager.
        self._take_news()
        match event.WhichOneof("event"):
            case "stored":
                self._change(stored=self._resolved([event.stored]))
            case "removed":
                self._change(removed=self._removed(event.removed.block_hashes))
            case "cleared":
                self._change(removed=self._removed(list(reversed(self._index))))
            case "snapshot":
                if event.snapshot.first:
                    parts.clear()
                parts.extend(event.snapshot.stored)
                if event.snapshot.last:
                    self._replace(parts)
                    parts.clear()

    def _replace(self, chains: Iterable[pb.BlocksStored]) -> None:
        """The index is what a snapshot says."""
        chains = list(chains)
        there = {name for chain in chains for name in chain.block_hashes}
        removed = self._removed([name for name in reversed(self._index) if name not in there])
        self._change(removed=removed, stored=self._resolved(chains))
        self._known.set()

    def _resolved(self, chains: Iterable[pb.BlocksStored]) -> list[Stored]:
        """The blocks whose tokens are known, with all that comes before them; the index has them from now on."""
        stored = []
        for chain in chains:
            parent = chain.parent_hash
            for name in chain.block_hashes:
                block = self._tokens.block(name)
                if block is None or (parent and parent not in self._index):
                    # Without its place nothing behind it has one.
                    break
                if name not in self._index:
                    self._index[name] = block
                    stored.append(Stored(name, block))
                parent = name
        return stored

    def _removed(self, names: Iterable[bytes]) -> list[Removed]:
        known = ((name, self._index.pop(name, None)) for name in list(names))
        return [Removed(name, block.salt) for name, block in known if block is not None]

    def _change(self, removed: Sequence[Removed] = (), stored: Sequence[Stored] = ()) -> None:
        if not removed and not stored:
            return
        self._last += 1
        self._changes.append(Change(self._last, removed, stored))
        for bell in self._bells:
            bell.set()


def own_blocks(change: Change, salt: str) -> Change:
    """What a change says of the blocks of one salt."""
    return Change(
        change.number,
        [each for each in change.removed if each.salt == salt],
        [each for each in change.stored if each.block.salt == salt],
    )
