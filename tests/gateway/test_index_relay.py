"""What a gateway is told of a runner's cache: applied as the proto says, it is what the KV manager can find."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from kvmanager.types import HashAlgorithm, IndexKind
from services import index_relay
from services.cache_options import CacheOptions
from services.index_relay import IndexRelay, own_blocks
from services.index_tokens import IndexTokens
from services.kv_events import EventStreams
from services.runner_errors import TooFarBehind
from tests.gateway.needed import need
from tests.services.session.bad_channel import FakeClock, FakeServer
from tests.services.session.stepped_engine import Bench

need("smg_grpc_proto")

from smg_grpc_proto.generated import common_pb2 as pb  # noqa: E402

from services.vllm_events import block_hash, change_batch, snapshot_batches  # noqa: E402

BLOCK = 4
PATIENCE = 30


class Gateway:
    """An index as smg keeps it, from batches alone."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.number = 0

    def apply(self, batch: pb.KvEventBatch) -> None:
        assert not self.number or batch.sequence_number == self.number + 1
        self.number = batch.sequence_number
        for event in batch.events:
            match event.WhichOneof("data"):
                case "cleared":
                    self.blocks.clear()
                case "removed":
                    for name in event.removed.block_hashes:
                        del self.blocks[name]
                case "stored":
                    self._store(event.stored)

    def _store(self, stored: pb.KvBlocksStored) -> None:
        parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
        assert parent is None or parent in self.blocks
        for block in stored.blocks:
            assert block.block_hash not in self.blocks
            assert (block.block_size, len(block.token_ids)) == (BLOCK, BLOCK)
            self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
            parent = block.block_hash


def watch_of(server: FakeServer) -> Any:
    """The events of whatever process runs; the stream breaks when another one takes its place."""

    async def watch(number: int, boot_id: str) -> AsyncIterator[Any]:
        manager = server.manager
        events = EventStreams(manager).watch("default", number, boot_id)
        while True:
            waiting = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({waiting}, timeout=0.001))[0]:
                if server.manager is not manager:
                    waiting.cancel()
                    raise grpc.RpcError
            yield waiting.result()

    return watch


def relay_of(bench: Bench) -> IndexRelay:
    return IndexRelay(watch_of(bench.server), bench.books.listen, IndexTokens(BLOCK, HashAlgorithm.SHA256))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def found(bench: Bench) -> set[int]:
    pool = bench.server.manager.pool("default")
    return {block_hash(name) for chain in pool.snapshot() for name in chain.names}


def begin(relay: IndexRelay) -> Gateway:
    gateway = Gateway()
    for batch in snapshot_batches(relay.snapshot(""), relay.last_number, BLOCK):
        gateway.apply(batch)
    return gateway


def follow(relay: IndexRelay, gateway: Gateway) -> None:
    for change in relay.since(gateway.number + 1):
        gateway.apply(change_batch(own_blocks(change, ""), BLOCK))


def run(test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    bench = Bench(FakeServer(FakeClock()), **options)
    bench.until_served()

    async def whole() -> None:
        await test(bench)

    asyncio.run(whole())


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_relay, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_a_gateway_knows_what_can_be_found(seed: int) -> None:
    """With evictions, since the pool is small, a reset, and two subscribers of which one comes late."""

    async def test(bench: Bench) -> None:
        rng = random.Random(seed)
        relay = relay_of(bench)
        await relay.ready()
        early, late = begin(relay), None
        shared = [rng.randrange(40) for _ in range(12)]
        for number in range(24):
            bench.submit(str(number), shared[: rng.randrange(12)] + rng.choices(range(40), k=5), rng.randrange(1, 12))
            bench.turn(rng.randrange(8))
            await asyncio.sleep(0)
            if number == 12:
                late = begin(relay)
        bench.until_all_ended()
        bench.assert_books_agree()
        await until(lambda: {block_hash(name) for name in relay._index} == found(bench))
        for gateway in (early, late):
            follow(relay, gateway)
            assert gateway.blocks.keys() == found(bench) != set()
        bench.server.manager.pool("default").reset_cache()
        await until(lambda: not relay._index)
        follow(relay, early)
        assert early.blocks == {}
        await relay.close()

    run(test, num_blocks=33)


def test_books_that_are_made_anew_are_told_as_changes() -> None:
    async def test(bench: Bench) -> None:
        relay = relay_of(bench)
        await relay.ready()
        gateway = begin(relay)
        bench.submit("a", list(range(20)), 4)
        bench.until_all_ended()
        bench.assert_books_agree()
        await until(lambda: len(relay._index) == 5)
        bench.server.kill()
        bench.server.start()
        bench.submit("b", list(range(30, 39)), 4)
        bench.until_all_ended()
        bench.assert_books_agree()
        await until(lambda: {block_hash(name) for name in relay._index} == found(bench))
        follow(relay, gateway)
        assert gateway.blocks.keys() == found(bench)
        assert len(gateway.blocks) == 8
        await relay.close()

    run(test)


def test_blocks_under_a_salt_are_told_to_nobody_else() -> None:
    async def test(bench: Bench) -> None:
        relay = relay_of(bench)
        await relay.ready()
        gateway = begin(relay)
        bench.submit("a", list(range(8)), 1)
        bench.submit("b", list(range(20, 32)), 1, cache_salt="s")
        bench.until_all_ended()
        bench.assert_books_agree()
        await until(lambda: len(relay._index) == 5)
        follow(relay, gateway)
        assert sorted(tokens for _, tokens in gateway.blocks.values()) == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert [each.block.tokens.tolist() for each in relay.snapshot("s")][-1] == [28, 29, 30, 31]
        assert len(relay.snapshot("")) == 2
        await relay.close()

    run(test)


def test_a_place_that_is_not_kept_must_begin_anew() -> None:
    async def test(bench: Bench) -> None:
        relay = relay_of(bench)
        await relay.ready()
        assert relay.since(relay.last_number + 1) == []
        for number in (1, relay.last_number, relay.last_number + 2):
            with pytest.raises(TooFarBehind, match="begin anew from 0"):
                relay.since(number)
        await relay.close()

    run(test)


def test_a_large_snapshot_comes_in_parts_with_numbers_up_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    from services import vllm_events

    monkeypatch.setattr(vllm_events, "SNAPSHOT_BLOCKS", 2)

    async def test(bench: Bench) -> None:
        relay = relay_of(bench)
        bench.submit("a", list(range(20)), 1)
        bench.until_all_ended()
        bench.assert_books_agree()
        await relay.ready()
        batches = list(snapshot_batches(relay.snapshot(""), relay.last_number, BLOCK))
        assert [(each.snapshot.index, each.snapshot.count, each.snapshot.blocks) for each in batches] == [
            (0, 3, 5),
            (1, 3, 5),
            (2, 3, 5),
        ]
        assert batches[-1].sequence_number == relay.last_number
        assert [len(event.stored.blocks) for each in batches for event in each.events] == [0, 2, 2, 1]
        gateway = Gateway()
        for batch in batches:
            gateway.apply(batch)
        assert gateway.blocks.keys() == found(bench)
        await relay.close()

    run(test)


def test_a_name_is_an_integer_of_64_bits_with_a_sign() -> None:
    assert block_hash(bytes([0xFF] * 8) + b"rest") == -1
    assert block_hash(bytes(7) + b"\x05" + b"rest") == 5


def test_without_events_what_sequences_tell_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_relay, "NEWS_SECONDS", 0.001)

    async def test(bench: Bench) -> None:
        relay = relay_of(bench)
        await relay.ready()
        bench.submit("a", list(range(20)), 20)
        bench.until_all_ended()
        await until(lambda: not relay._tap._told)
        assert relay.snapshot("") == []
        await relay.close()

    run(test, cache=CacheOptions(index=IndexKind.NONE))


def test_a_fault_of_the_watch_is_told_to_who_subscribes() -> None:
    async def broken(number: int, boot_id: str) -> AsyncIterator[Any]:
        raise ZeroDivisionError
        yield

    async def test(bench: Bench) -> None:
        relay = IndexRelay(broken, bench.books.listen, IndexTokens(BLOCK, HashAlgorithm.SHA256))
        for _ in range(2):
            with pytest.raises(ExceptionGroup):
                await relay.ready()
        await relay.close()

    run(test)
