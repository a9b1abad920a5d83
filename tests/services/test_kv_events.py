"""Streams of index events: what a consumer holds, from where it can begin, and what is left when it goes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

import services.kv_events as kv_events
from kvmanager.events import MAX_EVENTS, MAX_NAMES, EventLog
from kvmanager.manager import KvManager
from kvmanager.pool import Pool
from kvmanager.types import BASE_SCOPE, Append, CacheScope, IndexKind, PoolSpec
from services.errors import describe_rpc_error
from services.kv_events import SNAPSHOT_HASHES, EventStreams
from services.kv_process import RunningKvManager
from tests.services.kv_support import WAIT_SECONDS, kv_settings, kv_stub, running_kv_manager

SPEC = PoolSpec(9, 2)


@dataclass
class Consumer:
    """Applies every answer, and refuses what a consumer must never be told."""

    parents: dict[bytes, bytes] = field(default_factory=dict)
    number: int = 0
    in_snapshot: bool = False
    boot_ids: set[str] = field(default_factory=set)
    kinds: list[str] = field(default_factory=list)

    def apply(self, answer: pb.WatchEventsResponse) -> None:
        kind = answer.WhichOneof("event")
        self.kinds.append(kind)
        self.boot_ids.add(answer.boot_id)
        if kind == "snapshot":
            self._begin_or_go_on(answer)
        else:
            assert not self.in_snapshot
            assert answer.number == self.number + 1
        self.number = answer.number
        for chain in [answer.stored] if kind == "stored" else answer.snapshot.stored:
            self._store(chain)
        for name in answer.removed.block_hashes:
            assert name not in self.parents.values(), "removed before what continues it"
            del self.parents[name]
        if kind == "cleared":
            self.parents.clear()

    def _begin_or_go_on(self, answer: pb.WatchEventsResponse) -> None:
        assert answer.snapshot.first != self.in_snapshot
        if answer.snapshot.first:
            self.parents.clear()
        else:
            assert answer.number == self.number
        self.in_snapshot = not answer.snapshot.last

    def _store(self, chain: pb.BlocksStored) -> None:
        parent = chain.parent_hash
        assert chain.block_hashes
        for name in chain.block_hashes:
            assert not parent or parent in self.parents, "stored before its parent"
            assert name not in self.parents, "stored twice"
            self.parents[name] = parent
            parent = name


def index_of(pool: Pool) -> dict[bytes, bytes]:
    """The names that can be found, each with its parent, read from the index itself."""
    index = pool.block_pool.index
    return {name: index.names[index.parent(block)] for block, name in enumerate(index.names) if name}


# Over gRPC.


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningKvManager]:
    with running_kv_manager(kv_settings(tmp_path)) as running:
        yield running


@pytest.fixture
def stub(running: RunningKvManager) -> Iterator[Any]:
    with kv_stub(running.address) as stub:
        yield stub


def opened(stub: Any, pool_id: str = "", runner: str = "r", **facts: Any) -> pb.OpenPoolResponse:
    spec = pb.PoolSpec(**({"num_blocks": 9, "block_size": 2} | facts))
    return stub.OpenPool(pb.OpenPoolRequest(pool_id=pool_id, spec=spec, runner_id=runner))


def cached(stub: Any, tokens: Any, pool_id: str = "", **more: Any) -> None:
    """A prompt that is computed and ends."""
    stub.Allocate(pb.AllocateRequest(pool_id=pool_id, sequence_id="x", token_ids=tokens, **more))
    ends = [pb.SequenceAppend(sequence_id="x", computed_tokens=len(tokens))]
    stub.Free(pb.FreeRequest(pool_id=pool_id, sequences=ends))


@contextmanager
def watching(stub: Any, number: int = 0, **fields: Any) -> Iterator[Any]:
    call = stub.WatchEvents(pb.WatchEventsRequest(from_number=number, **fields), timeout=60)
    try:
        yield call
    finally:
        call.cancel()


def kinds_of(answers: list[pb.WatchEventsResponse]) -> list[tuple[str, int]]:
    return [(answer.WhichOneof("event"), answer.number) for answer in answers]


def take(call: Any, count: int) -> list[pb.WatchEventsResponse]:
    return [next(call) for _ in range(count)]


def test_from_0_it_begins_with_a_snapshot_and_goes_on_live(stub: Any) -> None:
    boot_id = opened(stub).boot_id
    cached(stub, [1, 1, 2, 2])
    with watching(stub) as call:
        first = next(call)
        assert (first.boot_id, first.number, first.snapshot.first, first.snapshot.last) == (boot_id, 1, True, True)
        (chain,) = first.snapshot.stored
        assert (len(chain.block_hashes), chain.parent_hash) == (2, b"")
        cached(stub, [1, 1, 3, 3])
        second = next(call)
        assert (second.boot_id, second.number) == (boot_id, 2)
        assert second.stored.parent_hash == chain.block_hashes[0]


def test_an_empty_pool_has_a_snapshot_of_one_part(stub: Any) -> None:
    opened(stub)
    with watching(stub) as call:
        answer = next(call)
    assert (answer.number, answer.snapshot) == (0, pb.IndexSnapshot(first=True, last=True))


def test_replay_from_a_number(stub: Any) -> None:
    boot_id = opened(stub).boot_id
    for token in range(5):
        cached(stub, [token] * 2)
    with watching(stub, 3, boot_id=boot_id) as call:
        assert kinds_of(take(call, 3)) == [("stored", 3), ("stored", 4), ("stored", 5)]
    with watching(stub, 5) as call:
        assert kinds_of(take(call, 1)) == [("stored", 5)]
    with watching(stub, 6, boot_id=boot_id) as call:
        cached(stub, [9] * 2)
        assert kinds_of(take(call, 1)) == [("stored", 6)]


@pytest.mark.parametrize(
    ("number", "boot_id"), [(0, ""), (1, "another process"), (3, "another process"), (99, ""), ((1 << 64) - 1, "")]
)
def test_numbers_that_mean_nothing_here_give_a_snapshot(stub: Any, number: int, boot_id: str) -> None:
    opened(stub)
    cached(stub, [1, 1, 2, 2])
    cached(stub, [3, 3])
    with watching(stub, number, boot_id=boot_id) as call:
        consumer = Consumer()
        consumer.apply(next(call))
    assert (consumer.kinds, consumer.number, len(consumer.parents)) == (["snapshot"], 2, 3)


def test_a_number_that_the_log_keeps_no_more_gives_a_snapshot(running: RunningKvManager, stub: Any) -> None:
    opened(stub, num_blocks=3)
    pool = running.manager.pool("default")
    log = running.manager.events("default")
    # Each turn stores one name and, from the third on, removes one: more than the log keeps.
    turns = MAX_EVENTS // 2 + 5

    # From this thread: no verb is under way, and nobody watches yet.
    for turn in range(turns):
        store(pool, turn)
    assert log.last_number == 2 * turns - 2
    oldest = log.last_number - MAX_EVENTS + 1
    with watching(stub, oldest - 1) as call:
        first = next(call)
        assert kinds_of([first]) == [("snapshot", log.last_number)]
        assert sum(len(chain.block_hashes) for chain in first.snapshot.stored) == 2
    with watching(stub, oldest) as call:
        answers = take(call, MAX_EVENTS)
    assert [answer.number for answer in answers] == list(range(oldest, log.last_number + 1))


@pytest.mark.parametrize("index", [pb.PREFIX_INDEX_HASH, pb.PREFIX_INDEX_RADIX])
@pytest.mark.parametrize("seed", range(3))
def test_a_consumer_equals_the_index_at_every_moment(
    running: RunningKvManager, stub: Any, index: int, seed: int
) -> None:
    opened(stub, prefix_index=index)
    rng = random.Random(seed)
    consumer, late = Consumer(), Consumer()
    names = iter(range(10_000))
    live: list[str] = []
    with watching(stub) as call:
        consumer.apply(next(call))
        for step in range(150):
            one_more(stub, rng, live, names, step)
            last = running.manager.events("default").last_number
            while consumer.number < last:
                consumer.apply(next(call))
            assert consumer.parents == index_of(running.manager.pool("default"))
            if step == 70:
                with watching(stub) as second:
                    late.apply(next(second))
                assert late.parents == consumer.parents
                late_call = stub.WatchEvents(pb.WatchEventsRequest(from_number=late.number + 1), timeout=60)
    while late.number < consumer.number:
        late.apply(next(late_call))
    late_call.cancel()
    assert late.parents == consumer.parents
    assert {"snapshot", "stored", "removed", "cleared"} == set(consumer.kinds)
    assert consumer.boot_ids == {running.manager.boot_id}


def one_more(stub: Any, rng: random.Random, live: list[str], names: Iterator[int], step: int) -> None:
    """One verb of a random history over few tokens, so that prefixes meet; now and then the pool starts anew."""
    if step % 50 == 49:
        live.clear()
        opened(stub, runner=f"r{step}", prefix_index=stub.GetPool(pb.GetPoolRequest()).spec.prefix_index)
        return
    choice = rng.random()
    try:
        if choice < 0.55 or not live:
            name = f"s{next(names)}"
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            stub.Allocate(pb.AllocateRequest(sequence_id=name, token_ids=tokens, scope=some_scope(rng)))
            live.append(name)
            stub.Append(pb.AppendRequest(appends=[pb.SequenceAppend(sequence_id=name, computed_tokens=len(tokens))]))
        elif choice < 0.65:
            child = f"s{next(names)}"
            stub.Fork(pb.ForkRequest(parent_id=rng.choice(live), child_ids=[child]))
            live.append(child)
        elif choice < 0.75:
            stub.Truncate(pb.TruncateRequest(sequence_id=rng.choice(live), num_tokens=rng.randint(1, 4)))
        elif choice < 0.85:
            told = pb.SequenceAppend(sequence_id=rng.choice(live), token_ids=[rng.randrange(2)] * 2)
            stub.Append(pb.AppendRequest(appends=[told]))
        elif choice < 0.9:
            stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=[rng.randrange(2)] * 2))
        else:
            stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id=live.pop(rng.randrange(len(live))))]))
    except grpc.RpcError as error:
        if describe_rpc_error(error).code not in ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"):
            raise
        for name in live:
            stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id=name)]))
        live.clear()


def some_scope(rng: random.Random) -> pb.CacheScope:
    return rng.choice([pb.CacheScope(), pb.CacheScope(), pb.CacheScope(salt="s"), pb.CacheScope(adapter_id="a")])


def test_a_pool_that_is_closed_and_opened_again_clears_and_numbers_go_on(stub: Any) -> None:
    opened(stub)
    cached(stub, [1, 1])
    with watching(stub, 1) as call:
        assert kinds_of(take(call, 1)) == [("stored", 1)]
        stub.ClosePool(pb.ClosePoolRequest())
        assert kinds_of(take(call, 1)) == [("cleared", 2)]
        with pytest.raises(grpc.RpcError, match="no pool 'default' is open") as caught, watching(stub, 1) as other:
            next(other)
        assert describe_rpc_error(caught.value).code == "NOT_FOUND"
        opened(stub)
        cached(stub, [2, 2])
        assert kinds_of(take(call, 1)) == [("stored", 3)]
        opened(stub, runner="another")
        cached(stub, [3, 3])
        assert kinds_of(take(call, 2)) == [("cleared", 4), ("stored", 5)]
    with watching(stub, 1) as call:
        everything = take(call, 5)
    consumer = Consumer()
    for answer in everything:
        consumer.apply(answer)
    assert len(consumer.parents) == 1


def test_an_unknown_pool_is_not_found(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught, watching(stub, pool_id="elsewhere") as call:
        next(call)
    view = describe_rpc_error(caught.value)
    assert (view.code, view.reason, view.metadata["pool_id"]) == ("NOT_FOUND", "UNKNOWN_POOL", "elsewhere")


def test_a_large_snapshot_comes_in_parts_with_parents_first(running: RunningKvManager, stub: Any) -> None:
    opened(stub, num_blocks=20_001, block_size=1)
    # From this thread: no verb is under way, and nobody watches yet.
    pool = running.manager.pool("default")
    scope = CacheScope("a", "1")
    computed(pool, range(9000), scope)
    for branch in range(50):
        computed(pool, [*range(branch * 150 + 1), 10_000 + branch, 10_000, 10_001], scope)
    for single in range(3000):
        computed(pool, [20_000 + single])
    consumer = Consumer()
    with watching(stub) as call:
        parts = [next(call)]
        while not parts[-1].snapshot.last:
            parts.append(next(call))
    for part in parts:
        consumer.apply(part)
        assert sum(len(chain.block_hashes) for chain in part.snapshot.stored) <= SNAPSHOT_HASHES
    assert len(parts) == 3
    assert consumer.parents == index_of(running.manager.pool("default"))
    assert len(consumer.parents) == 9000 + 50 * 3 + 3000
    chains = [chain for part in parts for chain in part.snapshot.stored]
    told = {chain.adapter_id for chain in chains if len(chain.block_hashes) > 1}
    assert told == {"a"}
    assert {chain.adapter_id for chain in chains if chain.parent_hash} == {"a"}
    assert {chain.adapter_id for chain in chains} == {"a", ""}


def test_many_watchers_see_the_same(stub: Any) -> None:
    opened(stub)
    calls = [stub.WatchEvents(pb.WatchEventsRequest(), timeout=60) for _ in range(20)]
    for call in calls:
        assert next(call).number == 0
    for token in range(20):
        cached(stub, [token] * 4)
    seen = [kinds_of(take(call, 30)) for call in calls]
    assert seen == [seen[0]] * 20
    for call in calls:
        call.cancel()


def test_a_cancelled_watcher_leaves_nothing_behind(running: RunningKvManager, stub: Any) -> None:
    opened(stub, "p")
    log = running.manager.events("p")
    calls = [stub.WatchEvents(pb.WatchEventsRequest(pool_id="p"), timeout=60) for _ in range(5)]
    for call in calls:
        next(call)
    assert log.on_event is not None
    for call in calls[:4]:
        call.cancel()
    cached(stub, [1, 1], "p")
    assert next(calls[4]).number == 1
    calls[4].cancel()
    deadline = time.monotonic() + WAIT_SECONDS
    while log.on_event is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert log.on_event is None
    cached(stub, [2, 2], "p")
    with watching(stub, 1, pool_id="p") as call:
        assert kinds_of(take(call, 2)) == [("stored", 1), ("stored", 2)]


# In process, where the consumer's pace can be chosen.


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


def manager_with(kept: int) -> tuple[KvManager, Pool]:
    """A manager whose log keeps so many events."""
    manager = KvManager("boot")
    manager._events["p"] = EventLog(kept)
    return manager, manager.open_pool("p", SPEC, "r").pool


def store(pool: Pool, token: int) -> None:
    """A prompt of one block."""
    computed(pool, [token, token])


def computed(pool: Pool, tokens: Sequence[int], scope: CacheScope = BASE_SCOPE) -> None:
    """A prompt that is computed and ends."""
    pool.allocate("x", tokens, scope=scope)
    pool.free([Append("x", (), len(tokens))])


@asynccontextmanager
async def stream(streams: EventStreams, number: int = 0, boot_id: str = "") -> AsyncIterator[Any]:
    async with aclosing(streams.watch("p", number, boot_id)) as watch:  # type: ignore[type-var]
        yield watch


@in_loop
async def test_a_slow_watcher_falls_back_to_a_snapshot() -> None:
    manager, pool = manager_with(kept=3)
    streams = EventStreams(manager)
    consumer = Consumer()
    async with stream(streams) as watch:
        consumer.apply(await anext(watch))
        for token in range(3):
            store(pool, token)
        for _ in range(3):
            consumer.apply(await anext(watch))
        for token in range(10, 17):
            store(pool, token)
        consumer.apply(await anext(watch))
        assert consumer.kinds == ["snapshot", "stored", "stored", "stored", "snapshot"]
        assert consumer.parents == index_of(pool)
        store(pool, 99)
        while consumer.number < manager.events("p").last_number:
            consumer.apply(await anext(watch))
        assert consumer.parents == index_of(pool)


@in_loop
async def test_a_watcher_that_falls_behind_amid_a_replay_is_told_no_gap() -> None:
    manager, pool = manager_with(kept=4)
    streams = EventStreams(manager)
    consumer = Consumer()
    async with stream(streams) as watch:
        consumer.apply(await anext(watch))
        for token in range(4):
            store(pool, token)
        consumer.apply(await anext(watch))
        # Three more are on their way, the log moves on by far meanwhile.
        for token in range(20, 40):
            store(pool, token)
        while consumer.number < manager.events("p").last_number:
            consumer.apply(await anext(watch))
        assert consumer.kinds == ["snapshot", "stored", "stored", "stored", "stored", "snapshot"]
        assert consumer.parents == index_of(pool)


@in_loop
async def test_events_between_the_parts_of_a_snapshot_come_behind_it() -> None:
    manager = KvManager("boot")
    pool = manager.open_pool("p", PoolSpec(2 * SNAPSHOT_HASHES + 10, 1), "r").pool
    pool.allocate("long", range(SNAPSHOT_HASHES + 5))
    pool.append([Append("long", (), SNAPSHOT_HASHES + 5)])
    streams = EventStreams(manager)
    consumer = Consumer()
    async with stream(streams) as watch:
        consumer.apply(await anext(watch))
        assert consumer.in_snapshot
        pool.allocate("short", [0, 99_999])
        pool.append([Append("short", (), 2)])
        consumer.apply(await anext(watch))
        assert not consumer.in_snapshot
        consumer.apply(await anext(watch))
    assert consumer.kinds == ["snapshot", "snapshot", "stored"]
    assert consumer.parents == index_of(pool)


@in_loop
async def test_a_watcher_that_is_gone_has_no_bell() -> None:
    manager, pool = manager_with(kept=100)
    streams = EventStreams(manager)
    first = asyncio.create_task(read_for_ever(streams))
    second = asyncio.create_task(read_for_ever(streams))
    await asyncio.sleep(0)
    assert [len(bells) for bells in streams._bells.values()] == [2]
    first.cancel()
    await asyncio.wait([first])
    assert [len(bells) for bells in streams._bells.values()] == [1]
    second.cancel()
    await asyncio.wait([second])
    assert streams._bells == {}
    assert manager.events("p").on_event is None
    store(pool, 1)


async def read_for_ever(streams: EventStreams) -> None:
    async with stream(streams) as watch:
        async for _ in watch:
            continue


@in_loop
async def test_a_watcher_waits_without_turning() -> None:
    manager, pool = manager_with(kept=100)
    streams = EventStreams(manager)
    async with stream(streams) as watch:
        await anext(watch)
        waiting = asyncio.create_task(anext(watch))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        store(pool, 1)
        assert (await asyncio.wait_for(waiting, 60)).number == 1


@in_loop
async def test_a_pool_that_is_closed_while_its_log_moves_on_is_an_empty_one() -> None:
    manager, pool = manager_with(kept=1)
    streams = EventStreams(manager)
    consumer = Consumer()
    store(pool, 1)
    async with stream(streams) as watch:
        consumer.apply(await anext(watch))
        store(pool, 2)
        manager.close_pool("p")
        consumer.apply(await anext(watch))
    assert consumer.kinds == ["snapshot", "snapshot"]
    assert (consumer.parents, consumer.number) == ({}, 3)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
def test_parts_of_any_size_make_the_same_tree(monkeypatch: pytest.MonkeyPatch, size: int, index: IndexKind) -> None:
    monkeypatch.setattr(kv_events, "SNAPSHOT_HASHES", size)
    manager = KvManager("boot")
    pool = manager.open_pool("p", PoolSpec(200, 1, index=index), "r").pool
    rng = random.Random(size)
    for _ in range(20):
        tokens = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        computed(pool, tokens, CacheScope(rng.choice(["", "a"])))

    async def read() -> list[pb.WatchEventsResponse]:
        parts = []
        async with stream(EventStreams(manager)) as watch:
            async for part in watch:
                parts.append(part)
                if part.snapshot.last:
                    break
        return parts

    consumer = Consumer()
    parts = asyncio.run(read())
    for part in parts:
        consumer.apply(part)
        assert sum(len(chain.block_hashes) for chain in part.snapshot.stored) <= size
    assert consumer.parents == index_of(pool)
    assert len(parts) >= len(consumer.parents) / size


def test_no_event_has_more_names_than_a_message_can_hold(running: RunningKvManager, stub: Any) -> None:
    """A verb on more blocks is told in several events: gRPC clients take 4 MiB at most unless they are told to."""
    most = 3 * MAX_NAMES + 1
    opened(stub, num_blocks=most + 1, block_size=1)
    pool = running.manager.pool("default")
    computed(pool, range(most))
    computed(pool, [7] * most)
    consumer = Consumer()
    with watching(stub, 1) as call:
        for answer in take(call, 12):
            consumer.apply(answer)
            assert len(answer.stored.block_hashes or answer.removed.block_hashes) in (MAX_NAMES, 1)
    assert consumer.kinds == ["stored"] * 4 + ["removed"] * 4 + ["stored"] * 4
    assert consumer.parents == index_of(pool)
    assert consumer.number == running.manager.events("default").last_number


def test_the_log_is_bounded_in_names_too() -> None:
    log = EventLog(kept=100, kept_names=5)
    for first in range(0, 12, 2):
        log.stored((bytes([first]), bytes([first + 1])), b"", "", "")
    assert log.since(4) is None
    assert [event.number for event in log.since(5) or ()] == [5, 6]
    # An event of more names than the log keeps is forgotten at once: watchers take a snapshot in its place.
    log.removed(tuple(bytes([name]) for name in range(6)))
    assert (log.last_number, log.since(7), log.since(8)) == (7, None, [])
    log.cleared()
    assert [event.number for event in log.since(8) or ()] == [8]


def test_the_log_tells_what_it_no_longer_has() -> None:
    log = EventLog(kept=2)
    assert log.since(1) == []
    assert (log.since(0), log.since(2)) == (None, None)
    for name in (b"a", b"b", b"c"):
        log.stored((name,), b"", "", "")
    assert log.since(1) is None
    assert [event.names for event in log.since(2) or ()] == [(b"b",), (b"c",)]
    assert log.since(4) == []
    assert log.since(5) is None
