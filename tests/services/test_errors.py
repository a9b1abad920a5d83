"""What a client reads of each refusal: code, reason, numbers and details."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb

from kvmanager import errors as kv
from services.channels import open_channel
from services.errors import RpcFailure, describe_rpc_error, kv_failure, rpc_error_details, to_status
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

SPEC = pb.PoolSpec(num_blocks=5, block_size=4, model_fingerprint="m")


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Any]:
    """A KV manager with an open pool of 4 usable blocks of 4 tokens, in which sequence s holds 2."""
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        stub.OpenPool(pb.OpenPoolRequest(spec=SPEC, runner_id="r"))
        stub.Allocate(pb.AllocateRequest(sequence_id="s", token_ids=range(8)))
        yield stub


def refused(call: Callable[[], object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def detail(error: grpc.RpcError, kind: type) -> Any:
    return next(each for each in rpc_error_details(error) if isinstance(each, kind))


def test_pool_short_tells_when_to_retry(stub: Any) -> None:
    error = refused(lambda: stub.Allocate(pb.AllocateRequest(sequence_id="t", token_ids=range(100, 112))))
    view = describe_rpc_error(error)
    assert (view.code, view.reason) == ("RESOURCE_EXHAUSTED", "POOL_SHORT")
    assert view.metadata["needed_blocks"] == "3"
    assert view.metadata["available_blocks"] == "2"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.nanos == 100_000_000
    assert detail(error, error_details_pb2.ErrorInfo).domain == "octavo.kv.v1"


def test_pins_exhausted_is_told_from_a_full_pool(stub: Any) -> None:
    # 4 usable blocks: 2 may be pinned, and a prompt of 12 tokens has 3.
    request = pb.AllocateRequest(sequence_id="t", token_ids=range(100, 112), retention=pb.Retention(pin_seconds=1))
    error = refused(lambda: stub.Allocate(request))
    view = describe_rpc_error(error)
    assert (view.code, view.reason) == ("RESOURCE_EXHAUSTED", "PINS_EXHAUSTED")
    assert (view.metadata["needed_blocks"], view.metadata["maximum"]) == ("3", "2")
    assert [type(each) for each in rpc_error_details(error)] == [error_details_pb2.ErrorInfo]


def test_never_fits_names_the_field_and_the_numbers(stub: Any) -> None:
    error = refused(lambda: stub.Allocate(pb.AllocateRequest(sequence_id="t", token_ids=range(17))))
    view = describe_rpc_error(error)
    assert (view.code, view.reason) == ("INVALID_ARGUMENT", "NEVER_FITS")
    assert (view.metadata["num_tokens"], view.metadata["maximum_tokens"]) == ("17", "16")
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert (violation.field, violation.description) == ("token_ids", view.sentence)


def test_unknown_pool_and_sequence_are_named(stub: Any) -> None:
    error = refused(lambda: stub.GetPool(pb.GetPoolRequest(pool_id="nowhere")))
    assert describe_rpc_error(error)[::2] == ("NOT_FOUND", "UNKNOWN_POOL")
    resource = detail(error, error_details_pb2.ResourceInfo)
    assert (resource.resource_type, resource.resource_name) == ("octavo.kv.v1/pool", "nowhere")

    error = refused(lambda: stub.Fork(pb.ForkRequest(parent_id="nobody", child_ids=["c"])))
    assert describe_rpc_error(error)[::2] == ("NOT_FOUND", "UNKNOWN_SEQUENCE")
    assert detail(error, error_details_pb2.ResourceInfo).resource_name == "nobody"


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        (lambda s: s.Allocate(pb.AllocateRequest(sequence_id="s", token_ids=[1])), "ALREADY_EXISTS", "SEQUENCE_EXISTS"),
        (lambda s: s.Append(pb.AppendRequest(epoch=7)), "FAILED_PRECONDITION", "STALE_EPOCH"),
        (lambda s: s.ResetCache(pb.ResetCacheRequest()), "FAILED_PRECONDITION", "POOL_BUSY"),
        (
            lambda s: s.OpenPool(pb.OpenPoolRequest(spec=pb.PoolSpec(num_blocks=9, block_size=4), runner_id="r")),
            "FAILED_PRECONDITION",
            "POOL_DIFFERS",
        ),
        (lambda s: s.Allocate(pb.AllocateRequest(sequence_id="t")), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        (lambda s: s.ListSequences(pb.ListSequencesRequest(page_size=-1)), "INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ],
)
def test_codes_and_reasons(stub: Any, call: Callable[[Any], object], code: str, reason: str) -> None:
    before = stub.GetPool(pb.GetPoolRequest()).occupancy
    view = describe_rpc_error(refused(lambda: call(stub)))
    assert (view.code, view.reason) == (code, reason)
    assert stub.GetPool(pb.GetPoolRequest()).occupancy == before


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (1, 16), (8, 0), (8, -1), (8, 3), (8, 2**31)])
def test_impossible_pools_are_refused_with_the_number(stub: Any, num_blocks: int, block_size: int) -> None:
    spec = pb.PoolSpec(num_blocks=num_blocks, block_size=block_size)
    error = refused(lambda: stub.OpenPool(pb.OpenPoolRequest(pool_id="other", spec=spec, runner_id="r")))
    view = describe_rpc_error(error)
    assert view.code == "INVALID_ARGUMENT"
    field, value = ("spec.num_blocks", num_blocks) if num_blocks < 2 else ("spec.block_size", block_size)
    assert str(value) in view.sentence
    assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == field


def test_bytes_that_are_no_message(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, open_channel(running.address) as channel:
        call = channel.unary_unary("/octavo.kv.v1.KvManagerService/GetPool")
        view = describe_rpc_error(refused(lambda: call(b"\xff\xff\xff")))
    assert (view.code, view.reason) == ("INVALID_ARGUMENT", "MALFORMED_REQUEST")


def test_an_oversized_message_is_refused(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, open_channel(running.address) as channel:
        call = channel.unary_unary("/octavo.kv.v1.KvManagerService/Lookup")
        view = describe_rpc_error(refused(lambda: call(bytes(100_000_000))))
    assert (view.code, view.reason) == ("RESOURCE_EXHAUSTED", "")
    assert str(64 << 20) in view.sentence


def test_an_unforeseen_exception_is_internal_and_tells_nothing(tmp_path: Path, capsys: Any) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        running.manager.pools = running.manager.pool = lambda *_: {}["secret"]  # type: ignore[method-assign]
        view = describe_rpc_error(refused(lambda: stub.GetPool(pb.GetPoolRequest())))
        del running.manager.pools, running.manager.pool
    assert (view.code, view.reason) == ("INTERNAL", "INTERNAL")
    assert "secret" not in view.sentence
    logged = capsys.readouterr()
    assert "KeyError" in logged.out + logged.err


def test_broken_books_are_a_fault_of_the_server() -> None:
    assert kv_failure(kv.BrokenBooks("count of block 3 is -1")) is None


def test_a_long_sentence_stays_below_the_size_of_a_trailer() -> None:
    failure = RpcFailure(grpc.StatusCode.INVALID_ARGUMENT, "x" * 10_000, "R", "d", {"k": "y" * 10_000}, field="f")
    assert to_status(failure).ByteSize() < 8192


def test_a_call_without_details_is_described_by_its_code(tmp_path: Path) -> None:
    with kv_stub(f"unix:{tmp_path}/nobody.sock") as stub:
        view = describe_rpc_error(refused(lambda: stub.GetPool(pb.GetPoolRequest())))
    assert (view.code, view.reason, view.metadata) == ("UNAVAILABLE", "", {})
