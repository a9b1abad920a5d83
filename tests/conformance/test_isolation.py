"""RFC 16016, PR 17045, CVE-2025-46570: who can't name another's salt learns nothing of what was cached under it.

Two KV managers of equal histories but for one prompt: under its salt, tenant A computes P in one, and a random prompt
of the same length in the other. All that tenant B can call and see, who knows P but not the salt, is equal in both.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.types import EvictionKind
from tests.conformance import cbor_rule
from tests.conformance.client import Client, Scope, refusal
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager, scrape

SALT_A, SALT_B = Scope(salt="the secret of A"), Scope(salt="b")
SIZE = 4
NUM_BLOCKS = 33
P = [11 * position % 97 for position in range(31)]
OTHER = random.Random(16016).sample(range(1000, 2000), len(P))

INDEXES = [pb.PREFIX_INDEX_HASH, pb.PREFIX_INDEX_RADIX]
POLICIES = [pb.EVICTION_POLICY_LRU, pb.EVICTION_POLICY_ADAPTIVE]


class Observer:
    """Tenant B: every answer that it gets, in a form in which those of two KV managers can be compared."""

    def __init__(self, client: Client, metrics_address: str) -> None:
        self.client = client
        self.seen: list[object] = []
        self._metrics_address = metrics_address
        self._names: dict[bytes, str] = {}

    def note(self, answer: Message) -> None:
        """Boot ids, epochs and hashes are replaced: equal ones by equal ones, in the order of their appearance."""
        self.seen.append((type(answer).__name__, self._plain(answer)))

    def look(self) -> None:
        """All that B can ask without changing anything."""
        client, pool_id = self.client, self.client.pool_id
        for scope in (Scope(), SALT_B, Scope("adapter")):
            for tokens in (P, [*P, 1, 2], P[:SIZE], P[: SIZE + 2], OTHER):
                self.note(client.lookup(tokens, scope=scope))
        self.note(client.lookup(P, spans=[("image", 0, 3)]))
        self.note(client.get())
        self.note(client.check())
        for salt in ("", SALT_B.salt, "a guess"):
            self.note(client.stub.GetTenant(pb.GetTenantRequest(pool_id=pool_id, salt=salt)))
        self.note(client.stub.ListSequences(pb.ListSequencesRequest(pool_id=pool_id)))
        self._snapshot()
        self._scrape()

    def act(self) -> None:
        """B computes P itself, without a salt and under its own, forks, forgets, and looks at its own tables."""
        client, pool_id = self.client, self.client.pool_id
        for number, scope in enumerate((Scope(), SALT_B)):
            name = f"b{number}"
            self.note(client.allocate(name, P, scope=scope))
            self.note(client.append(name, computed=len(P)))
            self.note(client.stub.GetBlockTable(pb.GetBlockTableRequest(pool_id=pool_id, sequence_id=name)))
            self.look()
            self.note(client.free(name))
            self.note(client.stub.RemovePrefix(pb.RemovePrefixRequest(pool_id=pool_id, token_ids=P, scope=scope.wire)))
        refused = refusal(lambda: client.allocate("b", [1] * SIZE * (NUM_BLOCKS - 1), headroom_blocks=1))
        self.seen.append(refused)

    def crowd(self) -> None:
        """B fills the pool block by block, so that what A cached is given up."""
        for number in range(NUM_BLOCKS + 5):
            self.note(self.client.cache("crowd", [5000 + number] * SIZE, scope=SALT_B))
        self.look()

    def events(self) -> None:
        """Every event so far, replayed."""
        for event in self.client.events(0):
            self.note(event)

    def hashes(self) -> set[bytes]:
        """Every hash that B was shown."""
        return set(self._names)

    def _snapshot(self) -> None:
        number, parents = self.client.snapshot()
        self.seen.append((number, sorted((self._name(name), self._name(parent)) for name, parent in parents.items())))

    def _scrape(self) -> None:
        """What is counted: how long it took and what the process needs are not books, and streams end when they end."""
        found = scrape(self._metrics_address)
        counted = [
            (name, [label for label in labels if label[0] != "epoch"], value)
            for (name, labels), value in found.items()
            if (name.startswith("octavo_kv_") or name == "octavo_rpc_duration_seconds_count")
            and not name.endswith(("_seconds_sum", "_seconds_bucket"))
        ]
        self.seen.append(sorted([each for each in counted if ("method", "WatchEvents") not in each[1]]))

    def _plain(self, message: Message) -> object:
        shown = []
        for field, value in message.ListFields():
            if field.name in ("boot_id", "epoch"):
                continue
            many = value if field.is_repeated else [value]
            shown.append((field.name, [self._value(each) for each in many]))
        return shown

    def _value(self, value: object) -> object:
        if isinstance(value, bytes):
            return self._name(value)
        return self._plain(value) if isinstance(value, Message) else value

    def _name(self, name: bytes) -> str:
        return self._names.setdefault(name, f"name {len(self._names)}") if name else ""


@contextmanager
def observed(directory: Path, index: int, policy: int) -> Iterator[Observer]:
    directory.mkdir()
    with running_kv_manager(kv_settings(directory)) as running, kv_stub(running.address) as stub:
        client = Client(stub, "p")
        client.open(NUM_BLOCKS, SIZE, prefix_index=index, eviction_policy=policy)
        yield Observer(client, running.metrics_address)


def history(observer: Observer, secret: list[int]) -> list[object]:
    """A computes its secret prompt, continues it, comes back to it and leaves, while B looks on and acts."""
    a, pool = "a's sequence", observer.client
    observer.look()
    with pool.watch() as live:
        observer.note(next(live))
        pool.allocate(a, secret, scope=SALT_A)
        observer.look()
        pool.append(a, computed=len(secret))
        observer.note(next(live))
        observer.look()
        pool.append(a, [3] * SIZE, computed=len(secret))
        observer.act()
        pool.free(a, computed=len(secret) + SIZE)
        observer.look()
        observer.act()
        assert pool.cache(a, secret, scope=SALT_A).cached_tokens > 0
        observer.look()
        observer.crowd()
    assert pool.lookup(secret, scope=SALT_A).cached_tokens < len(secret) - SIZE
    observer.events()
    return observer.seen


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("policy", POLICIES)
def test_16016_another_tenant_sees_no_difference(tmp_path: Path, index: int, policy: int) -> None:
    with observed(tmp_path / "one", index, policy) as observer:
        told_p = history(observer, P)
        hashes_p = observer.hashes()
    with observed(tmp_path / "two", index, policy) as observer:
        told_other = history(observer, OTHER)
        hashes_other = observer.hashes()
    assert told_p == told_other
    # The only difference is in hashes that B can't compute: those under A's salt.
    under_salt = set(cbor_rule.chain(P, [[("cache_salt", SALT_A.salt)]], SIZE))
    assert under_salt <= hashes_p
    assert under_salt.isdisjoint(hashes_other)


def test_16016_what_is_cached_under_a_salt_has_no_name_that_others_can_compute(tmp_path: Path) -> None:
    with observed(tmp_path / "one", pb.PREFIX_INDEX_HASH, pb.EVICTION_POLICY_LRU) as observer:
        observer.client.cache("a", P, scope=SALT_A)
        observer.look()
        observer.events()
        own = {name for keys in ([], [[("cache_salt", SALT_B.salt)]]) for name in cbor_rule.chain(P, keys, SIZE)}
        assert len(observer.hashes()) == len(P) // SIZE
        assert own.isdisjoint(observer.hashes())
        assert SALT_A.salt not in repr(observer.seen)


def test_16016_the_observer_would_see_a_shared_cache(tmp_path: Path) -> None:
    """The test of the test: without a salt B does tell P from another prompt, by several of its means."""
    seen = []
    for name, secret in (("one", P), ("two", OTHER)):
        with observed(tmp_path / name, pb.PREFIX_INDEX_HASH, pb.EVICTION_POLICY_LRU) as observer:
            observer.client.cache("a", secret)
            observer.look()
            observer.act()
            seen.append(observer.seen)
    different = [one for one, other in zip(*seen, strict=True) if one != other]
    kinds = {each[0] for each in different if isinstance(each, tuple)}
    assert {"LookupResponse", "AllocateResponse", "GetPoolResponse"} <= kinds


def test_policies_are_all_covered() -> None:
    """A policy that is added must keep tenants apart as well."""
    assert len(POLICIES) == len(EvictionKind)
