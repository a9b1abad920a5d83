"""Requests that make no sense, through a real server: INVALID_ARGUMENT with the numbers, and nothing changes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.errors import describe_rpc_error, rpc_error_details
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

INT64 = (1 << 63) - 1
USABLE = 8


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("kv")
    with running_kv_manager(kv_settings(directory)) as running, kv_stub(running.address) as stub:
        yield stub


@pytest.fixture(params=[pb.PREFIX_INDEX_HASH, pb.PREFIX_INDEX_RADIX, pb.PREFIX_INDEX_NONE])
def pool(stub: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """8 usable blocks of 4 tokens; sequence s holds 3 of them, 2 of which are full, and 1 is cached."""
    spec = pb.PoolSpec(num_blocks=USABLE + 1, block_size=4, prefix_index=request.param)
    stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="r"))
    stub.Allocate(pb.AllocateRequest(sequence_id="old", token_ids=range(50, 55)))
    stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="old", computed_tokens=5)]))
    stub.Allocate(pb.AllocateRequest(sequence_id="s", token_ids=range(10)))
    stub.Append(pb.AppendRequest(appends=[pb.SequenceAppend(sequence_id="s", computed_tokens=10)]))
    yield stub
    stub.ClosePool(pb.ClosePoolRequest())


def allocate(**fields: Any) -> pb.AllocateRequest:
    return pb.AllocateRequest(**({"sequence_id": "t", "token_ids": range(100, 106)} | fields))


def spans(*each: tuple[str, int, int]) -> pb.AllocateRequest:
    return allocate(spans=[pb.ContentSpan(content_id=name, offset=offset, length=size) for name, offset, size in each])


def append(**fields: Any) -> pb.AppendRequest:
    return pb.AppendRequest(appends=[pb.SequenceAppend(**({"sequence_id": "s"} | fields))])


def free(**fields: Any) -> pb.FreeRequest:
    return pb.FreeRequest(sequences=[pb.SequenceAppend(**({"sequence_id": "s"} | fields))])


LONG_SALT = pb.CacheScope(salt="x" * 129)

# The verb, the request, what its sentence says, and the field that the client is pointed to ("" for none).
BAD: list[tuple[str, Any, str, str]] = [
    ("SetQuota", pb.SetQuotaRequest(max_blocks=1), "names nobody", "whose"),
    ("SetQuota", pb.SetQuotaRequest(every_salt=False, max_blocks=1), "names nobody", "whose"),
    ("SetQuota", pb.SetQuotaRequest(salt="s", max_blocks=-1), "not -1", "max_blocks"),
    ("SetQuota", pb.SetQuotaRequest(salt="", max_blocks=-INT64 - 1), "not -9223372036854775808", "max_blocks"),
    ("SetQuota", pb.SetQuotaRequest(salt="s", max_blocks=USABLE + 1), "0 (no limit) to 8 blocks", "max_blocks"),
    ("SetQuota", pb.SetQuotaRequest(every_salt=True, max_blocks=INT64), "not 9223372036854775807", "max_blocks"),
    ("SetQuota", pb.SetQuotaRequest(salt="x" * 129, max_blocks=1), "at most 128 bytes, got 129", ""),
    ("SetQuota", pb.SetQuotaRequest(salt="\u00e4" * 65, max_blocks=1), "at most 128 bytes, got 130", ""),
    ("GetTenant", pb.GetTenantRequest(salt="x" * 129), "at most 128 bytes, got 129", ""),
    ("RemovePrefix", pb.RemovePrefixRequest(), "no tokens; it needs at least 1", "token_ids"),
    ("RemovePrefix", pb.RemovePrefixRequest(token_ids=[1], scope=LONG_SALT), "got 129", ""),
    (
        "Allocate",
        allocate(scope=pb.CacheScope(adapter_id="x" * 257)),
        "an adapter id has at most 256 bytes, got 257",
        "",
    ),
    (
        "Lookup",
        pb.LookupRequest(token_ids=[1], scope=pb.CacheScope(adapter_id="x", adapter_version="\u00e4" * 129)),
        "an adapter version has at most 256 bytes, got 258",
        "",
    ),
    (
        "RemovePrefix",
        pb.RemovePrefixRequest(token_ids=[1], scope=pb.CacheScope(adapter_version="2")),
        "has no adapter id",
        "",
    ),
    (
        "RemovePrefix",
        pb.RemovePrefixRequest(token_ids=[1], spans=[pb.ContentSpan(content_id="c", offset=0, length=2)]),
        "lie in the prompt's 1 tokens",
        "spans",
    ),
    ("Truncate", pb.TruncateRequest(sequence_id="s"), "has 10 tokens and can be rewound to 1 to as many", "num_tokens"),
    ("Truncate", pb.TruncateRequest(sequence_id="s", num_tokens=-1), "not to -1", "num_tokens"),
    ("Truncate", pb.TruncateRequest(sequence_id="s", num_tokens=11), "not to 11", "num_tokens"),
    ("Truncate", pb.TruncateRequest(sequence_id="s", num_tokens=INT64), "not to 9223372036854775807", "num_tokens"),
    ("Allocate", allocate(retention=pb.Retention(priority=101)), "0 to 100, not 101", "retention.priority"),
    ("Allocate", allocate(retention=pb.Retention(priority=-1)), "0 to 100, not -1", "retention.priority"),
    ("Allocate", allocate(retention=pb.Retention(priority=(1 << 31) - 1)), "not 2147483647", "retention.priority"),
    ("Allocate", allocate(retention=pb.Retention(pin_seconds=-0.5)), "not -0.5", "retention.pin_seconds"),
    ("Allocate", allocate(retention=pb.Retention(pin_seconds=math.nan)), "not nan", "retention.pin_seconds"),
    ("Allocate", allocate(retention=pb.Retention(pin_seconds=math.inf)), "not inf", "retention.pin_seconds"),
    ("Allocate", allocate(retention=pb.Retention(pin_seconds=-math.inf)), "not -inf", "retention.pin_seconds"),
    ("Allocate", allocate(retention=pb.Retention(pin_seconds=604801)), "0 to 604800 sec", "retention.pin_seconds"),
    ("Allocate", spans(("c", -1, 2)), "2 tokens from -1 on", "spans"),
    ("Allocate", spans(("c", 0, 0)), "0 tokens from 0 on", "spans"),
    ("Allocate", spans(("c", 0, -1)), "-1 tokens from 0 on", "spans"),
    ("Allocate", spans(("c", 0, 7)), "the prompt's 6 tokens", "spans"),
    ("Allocate", spans(("c", 6, 1)), "1 tokens from 6 on", "spans"),
    ("Allocate", spans(("c", INT64, INT64)), "from 9223372036854775807 on", "spans"),
    ("Allocate", spans(("c", 0, 3), ("d", 2, 2)), "span 'd' is 2 tokens from 2 on", "spans"),
    ("Allocate", spans(("c", 3, 2), ("d", 0, 2)), "(free from 5 on)", "spans"),
    ("Allocate", spans(("c", 0, 3), ("c", 0, 3)), "(free from 3 on)", "spans"),
    ("Allocate", spans(("", 0, 1)), "a content id must have 1 to 256 bytes, got 0", ""),
    ("Allocate", spans(("c" * 257, 0, 1)), "got 257", ""),
    ("Allocate", spans(("c\0", 0, 1)), "cannot be printed", ""),
    ("Allocate", spans(*[("c", 0, 1)] * 4097), "at most 4096 spans, got 4097", "spans"),
    ("Allocate", allocate(headroom_blocks=-1), "headroom_blocks is -1", "headroom_blocks"),
    ("Allocate", allocate(promised_tokens=-1), "promised_tokens is -1", "promised_tokens"),
    ("Allocate", allocate(lookahead_tokens=-1), "lookahead_tokens is -1", "lookahead_tokens"),
    ("Allocate", allocate(lookahead_tokens=-INT64 - 1), "lookahead_tokens is -9223372036854775808", "lookahead_tokens"),
    ("Allocate", allocate(lookahead_tokens=INT64), "8 usable", "token_ids"),
    ("Allocate", allocate(lookahead_tokens=27), "needs 9 blocks of 4", "token_ids"),
    ("Allocate", allocate(scope=LONG_SALT), "at most 128 bytes, got 129", ""),
    ("Allocate", allocate(sequence_id=""), "1 to 256 bytes, got 0", ""),
    ("Append", append(lookahead_tokens=-1), "lookahead_tokens is -1", ""),
    ("Append", append(lookahead_tokens=INT64), "8 usable", "token_ids"),
    ("Append", append(computed_tokens=-1), "computed_tokens -1", "computed_tokens"),
    ("Append", append(computed_tokens=9), "computed_tokens 9", "computed_tokens"),
    ("Append", append(computed_tokens=11), "10 known", "computed_tokens"),
    ("Append", append(computed_tokens=INT64), "computed_tokens 9223372036854775807", "computed_tokens"),
    ("Append", append(token_ids=range(4), computed_tokens=13), "room for 12", "computed_tokens"),
    ("Free", free(computed_tokens=11), "computed_tokens 11", "computed_tokens"),
    ("Free", free(token_ids=[1, 2, 3], computed_tokens=13), "room for 12", "computed_tokens"),
    ("Lookup", pb.LookupRequest(), "no tokens", "token_ids"),
    ("Lookup", pb.LookupRequest(token_ids=[1], spans=spans(("c", 0, 2)).spans), "prompt's 1 tokens", "spans"),
    ("Fork", pb.ForkRequest(parent_id="s"), "names 0 children", ""),
    ("Fork", pb.ForkRequest(parent_id="s", child_ids=map(str, range(1025))), "names 1025 children", ""),
    ("Fork", pb.ForkRequest(parent_id="s", child_ids=["c", "c"]), "a child twice", ""),
    ("ListSequences", pb.ListSequencesRequest(page_size=-1), "page_size is -1", "page_size"),
]


@pytest.mark.parametrize(("verb", "request_", "words", "field"), BAD)
def test_nonsense_is_refused_with_the_numbers(pool: Any, verb: str, request_: Any, words: str, field: str) -> None:
    before = state(pool)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(pool, verb)(request_)
    view = describe_rpc_error(caught.value)
    assert view.code == "INVALID_ARGUMENT"
    assert words in view.sentence
    fields = [
        violation.field
        for detail in rpc_error_details(caught.value)
        if isinstance(detail, error_details_pb2.BadRequest)
        for violation in detail.field_violations
    ]
    assert fields == ([field] if field else [])
    assert state(pool) == before


SPEC_FAULTS = [
    (pb.PoolSpec(num_blocks=1, block_size=4), "2 to 16777216 blocks", "spec.num_blocks"),
    (pb.PoolSpec(num_blocks=INT64, block_size=4), "not 9223372036854775807", "spec.num_blocks"),
    (pb.PoolSpec(num_blocks=-1, block_size=4), "not -1", "spec.num_blocks"),
    (pb.PoolSpec(num_blocks=9, block_size=3), "not 3", "spec.block_size"),
    (pb.PoolSpec(num_blocks=9, block_size=2048), "not 2048", "spec.block_size"),
    (pb.PoolSpec(num_blocks=9, block_size=4, bytes_per_block=-1), "bytes_per_block is -1", "spec.bytes_per_block"),
    (
        pb.PoolSpec(num_blocks=9, block_size=4, hash_algorithm=3),
        "hash_algorithm 3 is none of 0 to 2",
        "spec.hash_algorithm",
    ),
    (
        pb.PoolSpec(num_blocks=9, block_size=4, prefix_index=-1),
        "prefix_index -1 is none of 0 to 3",
        "spec.prefix_index",
    ),
    (pb.PoolSpec(num_blocks=9, block_size=4, eviction_policy=99), "eviction_policy 99 is none", "spec.eviction_policy"),
]


@pytest.mark.parametrize(("spec", "words", "field"), SPEC_FAULTS)
def test_facts_that_no_pool_has_open_nothing(stub: Any, spec: pb.PoolSpec, words: str, field: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.OpenPool(pb.OpenPoolRequest(pool_id="bad", spec=spec, runner_id="r"))
    view = describe_rpc_error(caught.value)
    assert view.code == "INVALID_ARGUMENT"
    assert words in view.sentence
    (violation,) = next(
        each for each in rpc_error_details(caught.value) if isinstance(each, error_details_pb2.BadRequest)
    ).field_violations
    assert violation.field == field
    with pytest.raises(grpc.RpcError, match="no pool 'bad' is open"):
        stub.GetPool(pb.GetPoolRequest(pool_id="bad"))


@pytest.mark.parametrize(
    ("verb", "request_"),
    [
        ("Truncate", pb.TruncateRequest(sequence_id="nobody", num_tokens=1)),
        ("Append", append(sequence_id="nobody")),
        ("Fork", pb.ForkRequest(parent_id="nobody", child_ids=["c"])),
        ("GetBlockTable", pb.GetBlockTableRequest(sequence_id="nobody")),
    ],
)
def test_sequences_that_nobody_knows(pool: Any, verb: str, request_: Any) -> None:
    before = state(pool)
    with pytest.raises(grpc.RpcError) as caught:
        getattr(pool, verb)(request_)
    view = describe_rpc_error(caught.value)
    assert (view.code, view.reason) == ("NOT_FOUND", "UNKNOWN_SEQUENCE")
    assert state(pool) == before


@pytest.mark.parametrize(
    "verb",
    [
        "ClosePool",
        "Allocate",
        "Append",
        "Fork",
        "Free",
        "Truncate",
        "Lookup",
        "GetBlockTable",
        "ListSequences",
        "GetPool",
        "GetTenant",
        "SetQuota",
        "RemovePrefix",
        "ResetCache",
        "Check",
    ],
)
def test_every_verb_says_which_pool_is_unknown(stub: Any, verb: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, verb)(getattr(pb, f"{verb}Request")(pool_id="elsewhere"))
    view = describe_rpc_error(caught.value)
    assert (view.code, view.reason, view.metadata["pool_id"]) == ("NOT_FOUND", "UNKNOWN_POOL", "elsewhere")


def test_what_is_just_in_range_is_taken(pool: Any) -> None:
    pool.SetQuota(pb.SetQuotaRequest(salt="x" * 128, max_blocks=USABLE))
    retention = pb.Retention(priority=100, pin_seconds=604800)
    pool.Allocate(allocate(retention=retention, spans=spans(("c" * 256, 0, 3), ("d", 3, 3)).spans))
    pool.Append(append(lookahead_tokens=2, computed_tokens=10))
    assert pool.Truncate(pb.TruncateRequest(sequence_id="t", num_tokens=6)).dropped_blocks == 0
    assert pool.Truncate(pb.TruncateRequest(sequence_id="t", num_tokens=1)).dropped_blocks == 1
    assert pool.Check(pb.CheckRequest()).ok


def test_a_salt_is_refused_where_names_can_collide(stub: Any) -> None:
    spec = pb.PoolSpec(num_blocks=9, block_size=4, hash_algorithm=pb.HASH_ALGORITHM_XXH3)
    stub.OpenPool(pb.OpenPoolRequest(pool_id="xxh3", spec=spec, runner_id="r"))
    scope = pb.CacheScope(salt="s")
    for verb, request_ in [
        ("Allocate", allocate(pool_id="xxh3", scope=scope)),
        ("Lookup", pb.LookupRequest(pool_id="xxh3", token_ids=[1], scope=scope)),
        ("RemovePrefix", pb.RemovePrefixRequest(pool_id="xxh3", token_ids=[1], scope=scope)),
    ]:
        with pytest.raises(grpc.RpcError, match="takes no cache salt") as caught:
            getattr(stub, verb)(request_)
        assert describe_rpc_error(caught.value).code == "INVALID_ARGUMENT"


def state(stub: Any) -> tuple[Any, ...]:
    """All that a refused verb must leave alone."""
    pool = stub.GetPool(pb.GetPoolRequest())
    table = stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id="s"))
    tenants = [stub.GetTenant(pb.GetTenantRequest(salt=salt)) for salt in ("", "s")]
    check = stub.Check(pb.CheckRequest())
    assert list(check.violations) == []
    return pool, table, tenants
