"""Streams of a pool's index events: replay from a number, a snapshot when it is too old, then live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.errors import UnknownPool
from kvmanager.events import EventLog, IndexEvent
from kvmanager.manager import KvManager
from services import kv_wire as wire

SNAPSHOT_HASHES = 4096
"""Hashes in one part of a snapshot: 128 KiB."""


class EventStreams:
    """The watchers of every pool. Each keeps only a number: one that reads slowly costs nothing, and falls back to a
    snapshot when the log has moved on."""

    def __init__(self, manager: KvManager) -> None:
        self._manager = manager
        self._bells: dict[str, set[asyncio.Event]] = {}

    async def watch(self, pool_id: str, number: int, boot_id: str) -> AsyncIterator[pb.WatchEventsResponse]:
        """Events from `number` on, for ever; 0, or a number of another boot, begins with a snapshot.

        Raises UnknownPool. A pool that is closed meanwhile is an empty one.
        """
        log = self._manager.events(pool_id)
        own_boot = self._manager.boot_id
        wanted = number if boot_id in ("", own_boot) else 0
        with self._bell(pool_id, log) as bell:
            while True:
                bell.clear()
                events = log.since(wanted) if wanted else None
                if events is None:
                    last = log.last_number
                    for part in _snapshot(self._chains(pool_id), last, own_boot):
                        yield part
                    wanted = last + 1
                    continue
                for event in events:
                    yield wire.event_to_wire(event, own_boot)
                wanted += len(events)
                if wanted > log.last_number:
                    await bell.wait()

    def _chains(self, pool_id: str) -> list[IndexEvent]:
        try:
            return self._manager.pool(pool_id).snapshot()
        except UnknownPool:
            return []

    @contextmanager
    def _bell(self, pool_id: str, log: EventLog) -> Iterator[asyncio.Event]:
        """An event that is set whenever the log has grown."""
        bells = self._bells.setdefault(pool_id, set())
        log.on_event = lambda: _ring(bells)
        bell = asyncio.Event()
        bells.add(bell)
        try:
            yield bell
        finally:
            bells.discard(bell)
            if not bells:
                log.on_event = None
                del self._bells[pool_id]


def _ring(bells: set[asyncio.Event]) -> None:
    for bell in bells:
        bell.set()


def _snapshot(chains: list[IndexEvent], number: int, boot_id: str) -> Iterator[pb.WatchEventsResponse]:
    """The parts of a snapshot, each of SNAPSHOT_HASHES hashes but the last; an empty index has one as well."""
    part = _part(number, boot_id)
    part.snapshot.first = True
    room = SNAPSHOT_HASHES
    for chain in chains:
        left = chain
        while left.names:
            if not room:
                yield part
                part, room = _part(number, boot_id), SNAPSHOT_HASHES
            piece = left._replace(names=left.names[:room])
            part.snapshot.stored.append(wire.stored_to_wire(piece))
            room -= len(piece.names)
            left = left._replace(names=left.names[len(piece.names) :], parent=piece.names[-1])
    part.snapshot.last = True
    yield part


def _part(number: int, boot_id: str) -> pb.WatchEventsResponse:
    return pb.WatchEventsResponse(boot_id=boot_id, number=number, snapshot=pb.IndexSnapshot())
