"""The verbs of the KV manager through a real server, and how its process behaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager.types import Append, BlockCopy, CacheScope, Grant, Occupancy, PoolSpec, Totals
from services import kv_wire as wire
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

SPEC = pb.PoolSpec(num_blocks=9, block_size=4, bytes_per_block=10, model_fingerprint="m")


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
    first, second = appended.grants
    assert (first.sequence_id, first.first_index) == ("a", 1)
    copy = pb.BlockCopy(source_block_id=forked.block_ids[1], target_block_id=first.block_ids[0], num_tokens=2)
    assert list(first.copies) == [copy]
    assert list(second.copies) == []

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
    assert (pool.pool_id, pool.spec, pool.epoch) == ("default", SPEC, epoch)
    assert (pool.totals.forks, pool.totals.copies, pool.totals.unknown_frees) == (1, 1, 1)

    check = stub.Check(pb.CheckRequest())
    assert (check.ok, list(check.violations), check.checked_blocks) == (True, [], 9)
    assert stub.ResetCache(pb.ResetCacheRequest(epoch=epoch)).forgotten_blocks == 1
    assert stub.ClosePool(pb.ClosePoolRequest(epoch=epoch)).closed_sequences == 0


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
    occupancy = Occupancy(*range(1, 9))
    assert [value for _, value in wire.occupancy_to_wire(occupancy).ListFields()] == list(range(1, 9))
    totals = Totals(*range(1, 11))
    assert {field.name: value for field, value in wire.totals_to_wire(totals).ListFields()} == asdict(totals)
    spec = PoolSpec(9, 4, 10, "m")
    assert wire.spec_from_wire(wire.spec_to_wire(spec)) == spec
    assert wire.scope_from_wire(pb.CacheScope(adapter_id="a", adapter_version="v", salt="s")) == CacheScope(
        "a", "v", "s"
    )
    append = pb.SequenceAppend(sequence_id="s", token_ids=[1, 2], computed_tokens=3)
    assert wire.appends_from_wire([append]) == [Append("s", [1, 2], 3)]
    grant = wire.grant_to_wire(Grant("s", 1, (2, 3), (BlockCopy(4, 5, 6),)))
    copy = pb.BlockCopy(source_block_id=4, target_block_id=5, num_tokens=6)
    assert grant == pb.SequenceGrant(sequence_id="s", first_index=1, block_ids=[2, 3], copies=[copy])


@pytest.mark.parametrize("module", ["services.kv_process", "services.cli_kv"])
def test_the_kv_side_needs_neither_torch_nor_the_engine(module: str) -> None:
    code = f"import sys, {module}; sys.exit(any(each in sys.modules for each in ('torch', 'model_runner', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
