"""The hand-over from the engine's thread to the event loop: once a step, whatever the number of streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from model_runner.engine_types import DuplicateRequest, EngineStopped, Failure, FailureKind
from model_runner.request import Chunk, FinishReason, PositionLogprobs, Usage
from services.reader_limits import CHUNK_ENTRIES
from services.runner_errors import NotReady, PinsExhausted, RequestFailed, RequestRefused
from services.streams import Streams

USAGE = Usage(1, 0, 1, 0, 0.0, 0.0, 0.0)


def chunk(name: str, token: int, *, last: bool = False) -> Chunk:
    reason = FinishReason.LENGTH if last else None
    return Chunk(name, 0, (token,), str(token), finish_reason=reason, usage=USAGE if last else None)


class CountingLoop:
    """An event loop that runs what other threads give it when it is told to."""

    def __init__(self) -> None:
        self.given: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        self.given.append((callback, arguments))

    def run(self) -> None:
        for callback, arguments in self.given:
            callback(*arguments)
        self.given.clear()


def test_a_step_wakes_the_loop_once_for_all_streams() -> None:
    async def run() -> None:
        loop = CountingLoop()
        streams = Streams(cast(asyncio.AbstractEventLoop, loop))
        names = [f"r{number}" for number in range(64)]
        opened = {name: streams.open(name) for name in names}
        for token in range(3):
            streams.deliver([chunk(name, 100 * token + index, last=token == 2) for index, name in enumerate(names)])
        assert len(loop.given) == 3
        loop.run()
        for index, name in enumerate(names):
            # All at once, since nobody has read before.
            assert [each.token_ids async for each in opened[name]] == [(index, 100 + index, 200 + index)]
            assert opened[name].ended

    asyncio.run(run())


def test_what_comes_for_a_closed_stream_is_ignored() -> None:
    async def run() -> None:
        loop = CountingLoop()
        streams = Streams(cast(asyncio.AbstractEventLoop, loop))
        gone, stays = streams.open("gone"), streams.open("stays")
        streams.close(gone)
        streams.deliver([chunk("gone", 1), chunk("stays", 2, last=True), chunk("unknown", 3)])
        loop.run()
        assert [each.token_ids async for each in stays] == [(2,)]
        assert not gone.ended
        assert (gone.unread, len(streams)) == (0, 2)
        streams.close(stays)
        streams.deliver([chunk("gone", 4, last=True)])
        loop.run()
        assert len(streams) == 0

    asyncio.run(run())


def test_closing_a_stream_leaves_a_later_one_of_the_same_id() -> None:
    async def run() -> None:
        loop = CountingLoop()
        streams = Streams(cast(asyncio.AbstractEventLoop, loop))
        earlier = streams.open("a")
        streams.deliver([chunk("a", 5, last=True)])
        loop.run()
        streams.check_free("a")
        later = streams.open("a")
        assert [each.token_ids async for each in earlier] == [(5,)]
        streams.close(earlier)
        streams.deliver([chunk("a", 7, last=True)])
        loop.run()
        assert [each.token_ids async for each in later] == [(7,)]

    asyncio.run(run())


@pytest.mark.parametrize("client_is_gone", [False, True])
def test_an_id_is_free_when_the_last_word_on_it_has_come(client_is_gone: bool) -> None:
    """The engine has forgotten the request, and its last chunk is on the way: a later request must not get it."""

    async def run() -> None:
        loop = CountingLoop()
        streams = Streams(cast(asyncio.AbstractEventLoop, loop))
        stream = streams.open("a")
        if client_is_gone:
            streams.close(stream)
        streams.deliver([chunk("a", 5, last=True)])
        with pytest.raises(DuplicateRequest, match="'a' is live already"):
            streams.check_free("a")
        loop.run()
        streams.check_free("a")
        if not client_is_gone:
            assert [each.token_ids async for each in stream] == [(5,)]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (FailureKind.ENGINE, RequestFailed),
        (FailureKind.ELSEWHERE, NotReady),
        (FailureKind.REQUEST, RequestRefused),
        (FailureKind.PINS_EXHAUSTED, PinsExhausted),
        (FailureKind.NAME_TAKEN, DuplicateRequest),
        (FailureKind.STOPPING, EngineStopped),
    ],
)
def test_a_failure_ends_the_stream_with_its_sentence(kind: FailureKind, error: type[Exception]) -> None:
    async def run() -> None:
        loop = CountingLoop()
        streams = Streams(cast(asyncio.AbstractEventLoop, loop))
        stream = streams.open("a")
        streams.deliver([chunk("a", 1)])
        streams.deliver([Failure("a", "the sentence", kind)])
        loop.run()
        chunks = aiter(stream)
        assert (await anext(chunks)).token_ids == (1,)
        with pytest.raises(error, match="the sentence"):
            await anext(chunks)
        assert stream.ended

    asyncio.run(run())


def test_a_loop_that_is_closed_stops_no_engine() -> None:
    loop = asyncio.new_event_loop()
    streams = Streams(loop)
    loop.close()
    streams.deliver([chunk("a", 1)])


def test_each_chunk_goes_by_itself_to_who_reads_in_time() -> None:
    async def run() -> None:
        stream = Streams(asyncio.get_running_loop()).open("a")
        chunks = aiter(stream)
        for token in range(3):
            stream.put(chunk("a", token))
            assert (await anext(chunks)).token_ids == (token,)

    asyncio.run(run())


def test_a_request_pauses_while_too_much_is_unread_and_goes_on_when_most_is_read() -> None:
    async def run() -> None:
        told: list[bool] = []
        stream = Streams(asyncio.get_running_loop(), max_unread=2 * CHUNK_ENTRIES).open("a", told.append)
        # A token with 3 log-probabilities counts 4.
        logprobs = (PositionLogprobs(1, -1.0, ((1, -1.0), (2, -2.0))),)
        count = 2 * CHUNK_ENTRIES // 4
        for token in range(count):
            stream.put(replace(chunk("a", token), logprobs=logprobs))
        assert (stream.unread, told) == (2 * CHUNK_ENTRIES, [])
        stream.put(chunk("a", count))
        stream.put(chunk("a", count + 1))
        assert told == [True]
        chunks = aiter(stream)
        first = await anext(chunks)
        assert first.token_ids == tuple(range(CHUNK_ENTRIES // 4))
        assert len(first.logprobs) == CHUNK_ENTRIES // 4
        assert (stream.unread, told) == (CHUNK_ENTRIES + 2, [True])
        assert (await anext(chunks)).token_ids == tuple(range(CHUNK_ENTRIES // 4, CHUNK_ENTRIES // 2))
        assert (stream.unread, told) == (2, [True, False])
        stream.put(chunk("a", count + 2, last=True))
        assert [each.token_ids async for each in chunks] == [(count, count + 1, count + 2)]

    asyncio.run(run())


def test_what_has_ended_is_not_paused_and_what_is_dropped_takes_no_memory() -> None:
    async def run() -> None:
        told: list[bool] = []
        streams = Streams(asyncio.get_running_loop(), max_unread=1)
        stream = streams.open("a", told.append)
        stream.put(chunk("a", 1))
        stream.put(chunk("a", 2, last=True))
        assert (stream.unread, told) == (2, [])
        streams.close(stream)
        assert (stream.unread, len(streams)) == (0, 0)

    asyncio.run(run())


def test_a_failure_comes_after_what_was_there_before() -> None:
    async def run() -> None:
        stream = Streams(asyncio.get_running_loop()).open("a")
        for token in range(CHUNK_ENTRIES + 1):
            stream.put(chunk("a", token))
        stream.put(Failure("a", "the sentence", FailureKind.STOPPING))
        chunks = aiter(stream)
        assert (await anext(chunks)).token_ids == tuple(range(CHUNK_ENTRIES))
        assert (await anext(chunks)).token_ids == (CHUNK_ENTRIES,)
        with pytest.raises(EngineStopped, match="the sentence"):
            await anext(chunks)

    asyncio.run(run())
