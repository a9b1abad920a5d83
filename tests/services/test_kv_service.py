"""The verbs of the KV manager through a real server, and how its process behaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.types import (
    Append,
    BlockCopy,
    CacheScope,
    ContentSpan,
    EvictionKind,
    Grant,
    HashAlgorithm,
    IndexKind,
    Occupancy,
    PoolSpec,
    RecentLookups,
    Retention,
    Totals,
)
from services import kv_wire as wire
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

SPEC = pb.PoolSpec(num_blocks=9, block_size=4, bytes_per_block=10, model_fingerprint="m")
SHOWN = pb.PoolSpec(
    num_blocks=9,
    block_size=4,
    bytes_per_block=10,
    model_fingerprint="m",
    hash_algorithm=pb.HASH_ALGORITHM_SHA256,
    prefix_index=pb.PREFIX_INDEX_HASH,
    eviction_policy=pb.EVICTION_POLICY_ADAPTIVE,
)
"""SPEC as GetPool shows it: what was left open is named."""


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Any]:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        yield stub


def test_opening_again_with_the_same_facts_changes_nothing(stub: Any) -> None:
    first = stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r"))
    assert (first.created, first.occupancy.usable_blocks) == (True, 8)
    stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=[1]))
    again = stub.OpenPool(pb.OpenPoolRequest(pool_id="default", spec=SPEC, runner_id="r"))
    assert (again.epoch, again.created, again.boot_id) == (first.epoch, False, first.boot_id)
    assert again.occupancy.sequences == 1


def test_a_process_that_starts_again_at_once_gives_out_higher_epochs(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
            epochs.append(stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r")).epoch)
    assert epochs[0] < epochs[1] < epochs[2]


def test_another_runner_starts_empty_under_the_next_epoch(stub: Any) -> None:
    first = stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r"))
    stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=[1]))
    second = stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="other"))
    assert (second.epoch, second.created, second.occupancy.sequences) == (first.epoch + 1, True, 0)


def test_a_sequence_from_its_prompt_to_its_end(stub: Any) -> None:
    epoch = stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r")).epoch
    allocated = stub.Allocate(pb.AllocateRequest(epoch=epoch, sequence_id="a", token_ids=range(6)))
    assert (len(allocated.block_ids), allocated.cached_tokens, allocated.occupancy.held_blocks) == (2, 0, 2)

    forked = stub.Fork(pb.ForkRequest(epoch=epoch, parent_id="a", child_ids=["b"]))
    assert list(forked.block_ids) == list(allocated.block_ids)
    assert forked.occupancy.shared_blocks == 2

    news = [pb.SequenceAppend(sequence_id=each, token_ids=[9], computed_tokens=6) for each in "ab"]
    appended = stub.Append(pb.AppendRequest(epoch=epoch, appends=news))
    # b writes last and keeps the shared tail: its block table has not changed, so that nothing is granted to it.
    (grant,) = appended.grants
    assert (grant.sequence_id, grant.first_index, len(grant.block_ids)) == ("a", 1, 1)
    assert grant.block_ids[0] not in forked.block_ids
    copy = pb.BlockCopy(source_block_id=forked.block_ids[1], target_block_id=grant.block_ids[0], num_tokens=2)
    assert list(grant.copies) == [copy]
    assert table_of(stub, "a") == [forked.block_ids[0], grant.block_ids[0]]
    assert table_of(stub, "b") == list(forked.block_ids)

    table = stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id="a"))
    assert table.sequence == pb.SequenceInfo(sequence_id="a", num_tokens=7, computed_tokens=6, num_blocks=2)
    assert [block.reference_count for block in table.blocks] == [2, 1]
    assert [len(block.block_hash) for block in table.blocks] == [32, 0]
    assert [block.stored_tokens for block in table.blocks] == [4, 2]

    freed = stub.Free(pb.FreeRequest(epoch=epoch, sequences=[pb.SequenceAppend(sequence_id=each) for each in "abx"]))
    assert (freed.freed_sequences, freed.unknown_sequences) == (2, 1)
    assert (freed.occupancy.held_blocks, freed.occupancy.cached_blocks) == (0, 1)

    hit = stub.Lookup(pb.LookupRequest(token_ids=range(6)))
    assert (hit.cached_tokens, list(hit.block_ids)) == (4, [allocated.block_ids[0]])
    salted = stub.Lookup(pb.LookupRequest(token_ids=range(6), scope=pb.CacheScope(salt="s")))
    assert salted.cached_tokens == 0

    pool = stub.GetPool(pb.GetPoolRequest())
    assert (pool.pool_id, pool.spec, pool.epoch) == ("default", SHOWN, epoch)
    assert pool.recent_lookups == pb.RecentLookups(lookups=1, queried_tokens=6)
    assert (pool.totals.forks, pool.totals.copies, pool.totals.unknown_frees) == (1, 1, 1)

    check = stub.Check(pb.CheckRequest())
    assert (check.ok, list(check.violations), check.checked_blocks) == (True, [], 9)
    assert stub.ResetCache(pb.ResetCacheRequest(epoch=epoch)).forgotten_blocks == 1
    assert stub.ClosePool(pb.ClosePoolRequest(epoch=epoch)).closed_sequences == 0


def table_of(stub: Any, sequence_id: str) -> list[int]:
    table = stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id=sequence_id))
    return [block.block_id for block in table.blocks]


def test_a_sequence_is_rewound_and_grows_anew(stub: Any) -> None:
    stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r"))
    blocks = list(stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=range(14))).block_ids)
    stub.Append(pb.AppendRequest(appends=[pb.SequenceAppend(sequence_id="a", computed_tokens=14)]))
    cut = stub.Truncate(pb.TruncateRequest(sequence_id="a", num_tokens=6))
    assert (cut.dropped_blocks, cut.occupancy.held_blocks, cut.occupancy.cached_blocks) == (2, 2, 1)
    table = stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id="a"))
    assert table.sequence == pb.SequenceInfo(sequence_id="a", num_tokens=6, computed_tokens=6, num_blocks=2)
    # The second block can still be found, and a cached block continues it: it is copied, not written.
    news = pb.SequenceAppend(sequence_id="a", token_ids=[99], computed_tokens=6)
    (grant,) = stub.Append(pb.AppendRequest(appends=[news])).grants
    copy = pb.BlockCopy(source_block_id=blocks[1], target_block_id=grant.block_ids[0], num_tokens=2)
    assert (grant.first_index, list(grant.copies)) == (1, [copy])
    assert stub.Lookup(pb.LookupRequest(token_ids=range(14))).cached_tokens == 12


def test_a_prefix_is_removed(stub: Any) -> None:
    stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r"))
    for name, tokens in (("a", [*range(8), 50, 51, 52, 53]), ("b", [*range(8), 60, 61, 62, 63])):
        stub.Allocate(pb.AllocateRequest(sequence_id=name, token_ids=tokens))
        stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id=name, computed_tokens=12)]))
    one = stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=[*range(8), 50, 51, 52, 53]))
    assert (one.removed_blocks, one.held_blocks) == (1, 0)
    assert stub.Lookup(pb.LookupRequest(token_ids=[*range(8), 60, 61, 62, 63, 1])).cached_tokens == 12
    stub.Allocate(pb.AllocateRequest(sequence_id="c", token_ids=range(5)))
    both = stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=range(4)))
    assert (both.removed_blocks, both.held_blocks) == (2, 1)
    pool = stub.GetPool(pb.GetPoolRequest())
    assert (pool.totals.removed_blocks, pool.occupancy.cached_blocks) == (3, 0)


def test_quotas_and_what_a_tenant_sees(stub: Any) -> None:
    stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r"))
    stub.SetQuota(pb.SetQuotaRequest(salt="s", max_blocks=3))
    stub.SetQuota(pb.SetQuotaRequest(every_salt=True, max_blocks=5))
    stub.SetQuota(pb.SetQuotaRequest(salt="", max_blocks=7))
    assert [quota_of(stub, salt) for salt in ("s", "t", "")] == [3, 5, 7]
    scope = pb.CacheScope(salt="s")
    stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=range(8), scope=scope))
    stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="a", computed_tokens=8)]))
    stub.Allocate(pb.AllocateRequest(sequence_id="b", token_ids=[1], scope=scope))
    tenant = stub.GetTenant(pb.GetTenantRequest(salt="s"))
    assert tenant == pb.GetTenantResponse(quota_blocks=3, held_blocks=1, cached_blocks=2)
    stub.SetQuota(pb.SetQuotaRequest(salt="s", max_blocks=0))
    assert quota_of(stub, "s") == 0


def quota_of(stub: Any, salt: str) -> int:
    return int(stub.GetTenant(pb.GetTenantRequest(salt=salt)).quota_blocks)


def test_a_part_of_a_block_is_found_and_copied(stub: Any) -> None:
    spec = pb.PoolSpec(num_blocks=9, block_size=4, prefix_index=pb.PREFIX_INDEX_RADIX)
    stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="r"))
    blocks = list(stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=range(8))).block_ids)
    stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="a", computed_tokens=8)]))
    hit = stub.Lookup(pb.LookupRequest(token_ids=[0, 1, 2, 3, 4, 5, 60]))
    assert hit == pb.LookupResponse(cached_tokens=6, block_ids=blocks[:1], partial_block_id=blocks[1])
    answer = stub.Allocate(pb.AllocateRequest(sequence_id="b", token_ids=[0, 1, 2, 3, 4, 5, 60]))
    copy = pb.BlockCopy(source_block_id=blocks[1], target_block_id=answer.block_ids[1], num_tokens=2)
    assert (answer.cached_tokens, list(answer.copies)) == (6, [copy])


def test_sequences_are_listed_in_pages(stub: Any) -> None:
    stub.OpenPool(pb.OpenPoolRequest(pool_id="p", spec=pb.PoolSpec(num_blocks=300, block_size=1), runner_id="r"))
    names = sorted(f"s{number}" for number in range(250))
    for name in names:
        stub.Allocate(pb.AllocateRequest(pool_id="p", sequence_id=name, token_ids=[1]))
    assert [len(page) for page in pages(stub, 0)] == [100, 100, 50]
    assert [len(page) for page in pages(stub, 125)] == [125, 125]
    assert [len(page) for page in pages(stub, 5000)] == [250]
    assert [name for page in pages(stub, 7) for name in page] == names


def pages(stub: Any, size: int) -> Iterator[list[str]]:
    token = ""
    while True:
        answer = stub.ListSequences(pb.ListSequencesRequest(pool_id="p", page_size=size, page_token=token))
        yield [each.sequence_id for each in answer.sequences]
        token = answer.next_page_token
        if not token:
            return


def test_messages_carry_every_field() -> None:
    occupancy = Occupancy(*range(1, 11))
    assert told(wire.occupancy_to_wire(occupancy)) == asdict(occupancy)
    totals = Totals(*range(1, 14))
    assert told(wire.totals_to_wire(totals)) == asdict(totals)
    recent = RecentLookups(1, 2, 3)
    assert told(wire.recent_to_wire(recent)) == asdict(recent)
    assert wire.scope_from_wire(pb.CacheScope(adapter_id="a", adapter_version="v", salt="s")) == CacheScope(
        "a", "v", "s"
    )
    append = pb.SequenceAppend(sequence_id="s", token_ids=[1, 2], computed_tokens=3, lookahead_tokens=4)
    assert wire.appends_from_wire([append]) == [Append("s", [1, 2], 3, 4)]
    span = pb.ContentSpan(content_id="c", offset=1, length=2)
    assert wire.spans_from_wire([span]) == [ContentSpan("c", 1, 2)]
    assert wire.retention_from_wire(pb.Retention(priority=1, pin_seconds=2.5)) == Retention(1, 2.5)
    grant = wire.grant_to_wire(Grant("s", 1, (2, 3), (BlockCopy(4, 5, 6),)))
    copy = pb.BlockCopy(source_block_id=4, target_block_id=5, num_tokens=6)
    assert grant == pb.SequenceGrant(sequence_id="s", first_index=1, block_ids=[2, 3], copies=[copy])


def told(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


@pytest.mark.parametrize("index", IndexKind)
@pytest.mark.parametrize("eviction", EvictionKind)
@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_every_kind_of_pool_is_told(algorithm: HashAlgorithm, index: IndexKind, eviction: EvictionKind) -> None:
    spec = PoolSpec(9, 4, 10, "m", algorithm, index, eviction)
    message = wire.spec_to_wire(spec)
    assert wire.spec_from_wire(message) == spec
    assert pb.HashAlgorithm.Name(message.hash_algorithm) == f"HASH_ALGORITHM_{algorithm.name}"
    assert pb.PrefixIndex.Name(message.prefix_index) == f"PREFIX_INDEX_{index.name}"
    assert pb.EvictionPolicy.Name(message.eviction_policy) == f"EVICTION_POLICY_{eviction.name}"


def test_a_pool_that_says_nothing_is_of_the_usual_kind() -> None:
    assert wire.spec_from_wire(pb.PoolSpec(num_blocks=9, block_size=4)) == PoolSpec(9, 4)


@pytest.mark.parametrize("module", ["services.kv_process", "services.cli_kv"])
def test_the_kv_side_needs_neither_torch_nor_the_engine(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(each in sys.modules for each in ('torch', 'model_runner', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
