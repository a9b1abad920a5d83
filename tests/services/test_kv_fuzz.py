"""Requests drawn at random from the contract, edge values and all: none is INTERNAL, and the books stay right."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.errors import describe_rpc_error
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

VERBS = [
    method.name
    for method in pb.DESCRIPTOR.services_by_name["KvManagerService"].methods
    if not method.server_streaming and method.name not in ("OpenPool", "ClosePool")
]
EXPECTED = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED"}

SMALL = [0, 1, 2, 3, 4, 5, 8, 12]
INT64 = [-(1 << 63), -(1 << 32), -1, 1 << 31, 1 << 32, (1 << 63) - 1]
NUMBERS = {
    FieldDescriptor.TYPE_INT32: [-(1 << 31), -1, 100, 101, (1 << 31) - 1],
    FieldDescriptor.TYPE_INT64: INT64,
    FieldDescriptor.TYPE_UINT32: [(1 << 31) - 1, 1 << 31, (1 << 32) - 1],
    FieldDescriptor.TYPE_UINT64: [1 << 63, (1 << 64) - 1],
    FieldDescriptor.TYPE_DOUBLE: [-0.0, -1.0, 0.5, 5e-324, 604800.0, 604801.0, 1e308, math.inf, -math.inf, math.nan],
}
MUST = ("sequence_id", "parent_id", "child_ids", "token_ids", "appends", "sequences", "num_tokens")
"""Fields without which a request can hardly succeed."""
SELDOM = ("promised_tokens",)
"""Fields that stop other verbs until the caller has kept its word."""
LIKELY = ("Allocate", "Append", "Append", "Fork", "Truncate", "Free", "SetQuota", "SetQuota")
LIKELY_AT_REST = ("Allocate",) * 8 + ("ResetCache",) * 4
"""Verbs that are drawn more often: while sequences are live, and while none is."""
NAMES = "abcdef"
TEXTS = ["", "a", "b", "c", "d", "\0", "\u00e4" * 64, "x" * 128, "x" * 129, "x" * 257, "\U0001f600", "a b"]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of sequences that are live, and of such as are not."""

    live: list[str]
    unused: list[str]

    def fitting(self, field: FieldDescriptor) -> list[str]:
        """The names with which a field can work, or all of them."""
        if field.name == "child_ids" or field.full_name == "octavo.kv.v1.AllocateRequest.sequence_id":
            return self.unused or [*NAMES]
        if field.name in ("sequence_id", "parent_id"):
            return self.live or [*NAMES]
        return [*NAMES]


def names_in(stub: Any) -> Names:
    live = [each.sequence_id for each in stub.ListSequences(pb.ListSequencesRequest()).sequences]
    return Names(live, sorted({*NAMES} - {*live}))


def free_all(stub: Any) -> None:
    """Ends every sequence, and with it what a caller has promised."""
    stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id=each) for each in names_in(stub).live]))


def drawn(rng: random.Random, names: Names, message: Message) -> Message:
    """Fills a message: mostly with small values that can work, now and then with those at the edges."""
    for field in message.DESCRIPTOR.fields:
        left_out = 0.02 if field.name in MUST else 0.97 if field.name in SELDOM else 0.7
        if field.name in ("pool_id", "epoch") or rng.random() < left_out:
            continue
        if field.is_repeated:
            count = rng.choice([1, 1, 2, 3]) if field.message_type or field.type == field.TYPE_STRING else None
            tokens = rng.randrange(14)
            into = getattr(message, field.name)
            for _ in range(tokens if count is None else count):
                if field.message_type:
                    drawn(rng, names, into.add())
                else:
                    into.append(value(rng, names, field, rarely=0.002))
        elif field.message_type:
            drawn(rng, names, getattr(message, field.name))
        else:
            setattr(message, field.name, value(rng, names, field, rarely=0.08))
    return message


def value(rng: random.Random, names: Names, field: FieldDescriptor, rarely: float) -> Any:
    edge = rng.random() < rarely
    if field.type == field.TYPE_STRING:
        return rng.choice(TEXTS if edge else names.fitting(field) if rng.random() < 0.8 else NAMES)
    if field.type == field.TYPE_BOOL:
        return rng.random() < 0.3
    if field.name == "token_ids":
        return rng.choice(NUMBERS[field.type]) if edge else rng.randrange(2)
    return rng.choice(NUMBERS[field.type] if edge else SMALL)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory: Path = tmp_path_factory.mktemp("kv")
    with running_kv_manager(kv_settings(directory)) as running, kv_stub(running.address) as stub:
        yield stub


@pytest.mark.parametrize("algorithm", [pb.HASH_ALGORITHM_SHA256, pb.HASH_ALGORITHM_XXH3])
@pytest.mark.parametrize("index", [pb.PREFIX_INDEX_HASH, pb.PREFIX_INDEX_RADIX, pb.PREFIX_INDEX_NONE])
def test_no_request_is_internal(stub: Any, index: int, algorithm: int) -> None:
    spec = pb.PoolSpec(num_blocks=17, block_size=2, prefix_index=index, hash_algorithm=algorithm)
    stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="r"))
    rng = random.Random(10 * index + algorithm)
    worked = dict.fromkeys(VERBS, 0)
    try:
        for step in range(600):
            if step % 50 == 0:
                free_all(stub)
            names = names_in(stub)
            verb = rng.choice([*VERBS, *LIKELY] if names.live else [*VERBS, *LIKELY_AT_REST])
            request = drawn(rng, names, getattr(pb, f"{verb}Request")())
            try:
                getattr(stub, verb)(request)
                worked[verb] += 1
            except grpc.RpcError as error:
                view = describe_rpc_error(error)
                if view.code not in EXPECTED:
                    raise AssertionError(f"{view.code} for step {step}: {verb} {request}") from error
            if step % 20 == 0:
                assert list(stub.Check(pb.CheckRequest()).violations) == []
    finally:
        stub.ClosePool(pb.ClosePoolRequest())
    assert min(worked.values()) > 0, worked
