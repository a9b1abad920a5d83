"""When a session falls silent: by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvmanager.errors import SessionSilent
from services import session_stream
from services.presence import PoolSession, Presence
from services.session_stream import STALL_SECONDS, SessionStream
from tests.services.session_script import admit, opening, step
from tests.services.session_talk import Talk

LIMIT = 10.0
LAPSING = 4.0
"""0.4 of the limit."""


class FakeLoop:
    """A loop whose time stands still until it is moved; it has one timer at most."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due = 0.0
        self._call: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self.now

    def call_at(self, due: float, call: Callable[[float], None], argument: float) -> SimpleNamespace:
        self.due, self._call = due, lambda: call(argument)
        return SimpleNamespace(cancel=lambda: None)

    def fire(self, late: float = 0.0) -> None:
        """Moves the time to where the timer is due, or later, and calls it."""
        self.now = self.due + late
        self._call()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> FakeLoop:
    fake = FakeLoop()
    monkeypatch.setattr(session_stream.asyncio, "get_running_loop", lambda: fake)
    return fake


def stream_of_one_sequence(told: list[str] | None = None) -> tuple[Talk, SessionStream]:
    """told: where the pool's id goes when there is news of the session."""
    told = [] if told is None else told
    talk = Talk()
    talk.say(opening())
    talk.say(step(1, 1, admit(1, [1] * 4)))
    return talk, SessionStream(talk.core, LIMIT, told.append, lambda: None)


def ended(talk: Talk) -> bool:
    return talk.pool.occupancy().held_blocks == 0


def speak(stream: SessionStream, loop: FakeLoop, at: float) -> None:
    """A message comes at that time."""
    loop.now = at
    stream.hear()


def test_a_silence_as_long_as_the_limit_ends_the_session(loop):
    talk, stream = stream_of_one_sequence()
    loop.fire()
    assert not ended(talk)
    assert loop.due == 100.0 + LIMIT
    loop.fire()
    assert ended(talk)
    assert isinstance(stream.failure, SessionSilent)
    assert "for 10 s" in str(stream.failure)


def test_a_message_puts_the_end_off(loop):
    talk, stream = stream_of_one_sequence()
    speak(stream, loop, 103.0)
    loop.fire()
    assert loop.due == 103.0 + LAPSING
    loop.fire()
    assert not ended(talk)
    assert loop.due == 103.0 + LIMIT
    loop.fire()
    assert ended(talk)


def test_a_process_that_was_stopped_itself_listens_anew(loop):
    talk, stream = stream_of_one_sequence()
    loop.fire()
    loop.fire(late=STALL_SECONDS + 0.5)
    assert not ended(talk)
    woken = loop.now
    assert stream.state() == PoolSession(Presence.CONNECTED, 0.0)
    assert loop.due == woken + LAPSING
    loop.fire(late=STALL_SECONDS - 0.5)
    assert loop.due == woken + LIMIT
    loop.fire(late=STALL_SECONDS - 0.5)
    assert ended(talk)


def test_a_long_silence_is_told_before_it_ends_the_session_and_a_word_makes_it_good(loop):
    told: list[str] = []
    _, stream = stream_of_one_sequence(told)
    loop.now = 103.5
    assert stream.state() == PoolSession(Presence.CONNECTED, 3.5)
    assert told == []
    loop.fire()
    assert stream.state() == PoolSession(Presence.LAPSING, LAPSING)
    assert told == ["default"]
    speak(stream, loop, 109.0)
    assert stream.state() == PoolSession(Presence.CONNECTED, 0.0)
    assert told == ["default"] * 2
    loop.fire()
    assert loop.due == 109.0 + LAPSING
    assert told == ["default"] * 2
    loop.fire()
    assert stream.state().presence is Presence.LAPSING
    loop.fire()
    # The end is news as well.
    assert told == ["default"] * 4
    assert not stream.is_alive
