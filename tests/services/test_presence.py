"""Who listens to the sessions is told of each pool that is known already, and then of changes only."""

from __future__ import annotations

from kvmanager.manager import KvManager
from kvmanager.types import PoolSpec
from services.presence import NO_SESSION, Presence
from services.session_streams import SessionStreams


def test_a_listener_is_told_what_is_known_and_then_what_changes() -> None:
    manager = KvManager("boot")
    streams = SessionStreams(manager)
    told: list[tuple[str, Presence | None]] = []
    manager.open_pool("p", PoolSpec(4, 4), "one")
    streams.listen(lambda pool_id, presence: told.append((pool_id, presence)))
    assert told == [("p", Presence.NONE)]
    assert streams.session_of("p") == NO_SESSION
    # Another runner has it now, and still there is no session: no news.
    manager.open_pool("p", PoolSpec(4, 4), "two")
    manager.close_pool("p")
    assert told == [("p", Presence.NONE), ("p", None)]
    manager.open_pool("p", PoolSpec(4, 4), "three")
    assert told[2:] == [("p", Presence.NONE)]
