"""vllm-core.md 1b, items 29 to 31: what is told of the index, through WatchEvents."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from tests.conformance import cbor_rule
from tests.conformance.client import COMMON, Client, Scope, links, refusal

NewPool = Callable[..., Client]


def test_29_the_adapter_is_told(pool: Client) -> None:
    pool.prefill("a", COMMON, scope=Scope("lora", "2", "secret"))
    pool.append("a", [9] * 16, computed=48)
    pool.append("a", computed=64)
    first, second = [each.stored for each in pool.events(0)]
    assert [(each.adapter_id, each.adapter_version) for each in (first, second)] == [("lora", "2")] * 2
    assert second.parent_hash == first.block_hashes[-1]
    # Differs: no token ids and no salt are told, nor a group (a pool is one) or a session.
    assert {field.name for field in pb.BlocksStored.DESCRIPTOR.fields} == {
        "block_hashes",
        "parent_hash",
        "adapter_id",
        "adapter_version",
    }


def test_29_two_sessions_share(new_pool: NewPool) -> None:
    # Octavo has no session ids, which are no part of a block's identity in vLLM either.
    pool = new_pool(11, 4)
    first = pool.prefill("session 1", range(9))
    second = pool.prefill("session 2", range(9))
    assert (second.cached_tokens, list(second.block_ids[:2])) == (8, list(first.block_ids[:2]))
    assert pool.index_size == 2


def test_30_a_hit_is_no_event(pool: Client) -> None:
    # Differs: there is no mode that reports reuse, which is vLLM's default as well: a hit changes no name and no event.
    pool.prefill("a", COMMON + [3] * 7)
    number, names = pool.snapshot()
    pool.prefill("b", COMMON + [3] * 5)
    assert pool.counts("b")[:3] == [2, 2, 2]
    pool.free("a", "b")
    pool.allocate("c", COMMON + [3] * 6)
    assert pool.snapshot() == (number, names)


def test_31_the_parent_is_that_of_the_chain(pool: Client) -> None:
    """No table has null blocks here; a duplicate, which nobody finds, stands for the physical parent."""
    tokens = list(range(64))
    pool.prefill("first", tokens[:49])
    pool.prefill("second", tokens, skip_cache_read=True)
    names = cbor_rule.chain(tokens)
    first, second = [each.stored for each in pool.events(0)]
    assert (list(first.block_hashes), first.parent_hash) == (names[:3], b"")
    assert (list(second.block_hashes), second.parent_hash) == (names[3:], names[2])
    assert [block.block_id for block in pool.table("second")] == [5, 6, 7, 8]


def test_stored_in_one_event_per_commit_and_removed_ends_first(new_pool: NewPool) -> None:
    """1a.10. Differs: vLLM sends one event for each removed hash; here those of one verb are one event, ends first."""
    pool = new_pool(4)
    pool.cache("a", COMMON)
    pool.allocate("b", [7] * 32)
    stored, removed = pool.events(0)
    names = cbor_rule.chain(COMMON)
    assert list(stored.stored.block_hashes) == names
    assert list(removed.removed.block_hashes) == [names[2], names[1]]
    assert (stored.number, removed.number) == (1, 2)


def test_58119_every_parent_is_known_and_every_removal_was_stored(new_pool: NewPool) -> None:
    """58119, dynamo 11984, 57159: a random history, replayed into a tree."""
    pool = new_pool(9, 2)
    random_history(pool)
    parents, kinds = replayed(pool.events(0))
    assert kinds == {"stored", "removed", "cleared"}
    assert parents == pool.snapshot()[1]


def random_history(pool: Client) -> None:
    rng = random.Random(58119)
    live: list[str] = []
    for step in range(150):
        if live and (rng.random() < 0.4 or pool.available < 5):
            pool.free(live.pop(rng.randrange(len(live))))
        else:
            prompt = [rng.randrange(2) for _ in range(rng.randint(2, 8))]
            pool.prefill(f"s{step}", prompt, scope=Scope(salt=rng.choice(["", "", "s"])))
            live.append(f"s{step}")
        if step == 75:
            pool.free(*live)
            live.clear()
            pool.reset()


def replayed(events: list[pb.WatchEventsResponse]) -> tuple[dict[bytes, bytes], set[str]]:
    """The tree that a consumer holds at the end, each parent by its child, and the kinds of events that it saw."""
    parents: dict[bytes, bytes] = {}
    kinds = set()
    for event in events:
        kinds.add(event.WhichOneof("event"))
        for name, parent in links(event.stored):
            assert name not in parents
            assert parent == b"" or parent in parents
            parents[name] = parent
        for name in event.removed.block_hashes:
            assert name in parents
            assert name not in parents.values()
            del parents[name]
        if event.HasField("cleared"):
            parents.clear()
    return parents, kinds


def test_events_of_a_pool_that_nobody_opened(pool: Client) -> None:
    unknown = Client(pool.stub, "nobody opened it")
    refused = refusal(unknown.snapshot)
    assert (refused.code, refused.reason) == ("NOT_FOUND", "UNKNOWN_POOL")


@pytest.mark.parametrize("index", [pb.PREFIX_INDEX_HASH, pb.PREFIX_INDEX_RADIX])
def test_nothing_is_told_of_what_is_not_computed(new_pool: NewPool, index: int) -> None:
    """1a.4, 7: vLLM tells of blocks as it allocates them. Here a block is told once its tokens are computed."""
    pool = new_pool(prefix_index=index)
    pool.allocate("a", COMMON)
    pool.free("a")
    assert pool.snapshot() == (0, {})
