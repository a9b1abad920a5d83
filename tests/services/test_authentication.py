"""Tokens at a server: who gets in, as whom, and what tenants see of each other."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from octavo.runner.v1 import model_runner_pb2 as pb
from octavo.runner.v1 import model_runner_pb2_grpc

from model_runner.request import FinishReason
from services.authentication import open_guards
from services.channels import open_channel
from services.client import AsyncClient, Client, OctavoError
from services.config import ClientSettings, ModelRunnerSettings, load_settings
from services.errors import StartupError, describe_rpc_error
from tests.model_runner.toy_model import answer
from tests.services.kv_support import WAIT_SECONDS
from tests.services.toy_server import ToyServer, tokens_of, wait_until

ACME, OTHER = "acme-token-0123456789", "other-token-0123456789"
TOKENS = f"- {{tenant: acme, token: {ACME}, salt: pepper}}\n- {{tenant: other, token: {OTHER}}}\n"
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ToyServer]:
    path = tmp_path / "tokens.yaml"
    path.write_text(TOKENS)
    with ToyServer(tmp_path, auth_tokens=str(path), token=ACME) as running:
        yield running


def refused(call: Any) -> OctavoError:
    with pytest.raises(OctavoError) as caught:
        call()
    return caught.value


def of_tenant(server: ToyServer, token: str) -> Client:
    return server.client(token=token)


CALLS = (
    lambda stub, **more: list(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])), **more)),
    lambda stub, **more: stub.Tokenize(pb.TokenizeRequest(text="a"), **more),
    lambda stub, **more: stub.Detokenize(pb.DetokenizeRequest(token_ids=[1]), **more),
    lambda stub, **more: stub.GetModel(pb.GetModelRequest(), **more),
    lambda stub, **more: stub.ListRequests(pb.ListRequestsRequest(), **more),
    lambda stub, **more: stub.Abort(pb.AbortRequest(request_ids=["a"]), **more),
)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", f"Basic {ACME}"),), "TOKEN_MALFORMED"),
        ((("authorization", ACME),), "TOKEN_MALFORMED"),
        ((("authorization", f"Bearer {ACME}"), ("authorization", f"Bearer {ACME}")), "TOKEN_MALFORMED"),
        ((("authorization", "Bearer "),), "TOKEN_UNKNOWN"),
        ((("authorization", f"Bearer {ACME}x"),), "TOKEN_UNKNOWN"),
    ],
)
def test_no_verb_is_open_without_a_right_token(server: ToyServer, metadata: Any, reason: str) -> None:
    with open_channel(server.address) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        assert len(CALLS) == len(pb.DESCRIPTOR.services_by_name["ModelRunnerService"].methods)
        for call in CALLS:
            with pytest.raises(grpc.RpcError) as caught:
                call(stub, metadata=metadata, timeout=WAIT_SECONDS)
            view = describe_rpc_error(caught.value)
            assert (view.code, view.reason) == ("UNAUTHENTICATED", reason)
            assert ACME not in view.sentence
    assert server.executor.steps == []
    verbs = {dict(labels)["code"] for name, labels in server.samples() if name == "octavo_rpc_duration_seconds_count"}
    assert verbs == {"UNAUTHENTICATED"}


def test_the_scheme_may_be_written_in_any_case(server: ToyServer) -> None:
    with open_channel(server.address) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        for scheme in ("bearer", "BEARER"):
            metadata = (("authorization", f"{scheme} {ACME}"),)
            assert stub.GetModel(pb.GetModelRequest(), metadata=metadata, timeout=WAIT_SECONDS).model == "toy"


def test_health_and_reflection_are_open(server: ToyServer) -> None:
    with open_channel(server.address) as channel:
        for name in ("liveness", "readiness", ""):
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_SECONDS)
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        assert next(stub.ServerReflectionInfo(asked, timeout=WAIT_SECONDS)).list_services_response.service


def test_a_token_sets_tenant_and_salt(server: ToyServer) -> None:
    with of_tenant(server, ACME) as acme, of_tenant(server, OTHER) as other:
        for client, cached in ((acme, 0), (other, 0), (acme, 8), (other, 8)):
            chunks = list(client.generate(PROMPT, max_tokens=2))
            assert tokens_of(chunks) == answer(PROMPT, 2)
            assert chunks[-1].usage.cached_tokens == cached
        # What is its own may be said.
        assert tokens_of(list(acme.generate(PROMPT, tenant="acme", cache_salt="pepper", max_tokens=1)))
        stream = acme.generate(PROMPT, request_id="r")
        next(stream)
        assert [(each.tenant, each.request_id) for each in acme.requests()] == [("acme", "r")]
        assert server.pool.tenant_usage("pepper").held_blocks > 0
        acme.abort("r")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tenant": "other"}, "The token is that of tenant 'acme', not of 'other'; leave the tenant out."),
        ({"cache_salt": "mint"}, "The token of tenant 'acme' sets the cache salt; leave the salt out."),
    ],
)
def test_another_tenant_or_salt_is_refused(server: ToyServer, options: dict[str, str], sentence: str) -> None:
    with of_tenant(server, ACME) as client:
        error = refused(lambda: list(client.generate(PROMPT, **options)))
    assert (error.code, error.reason, error.sentence) == ("PERMISSION_DENIED", "NOT_YOURS", sentence)
    assert server.executor.steps == []


def test_a_tenant_sees_and_ends_its_own_requests_only(server: ToyServer) -> None:
    with of_tenant(server, ACME) as acme, of_tenant(server, OTHER) as other:
        theirs = acme.generate(PROMPT, request_id="r")
        first = next(theirs)
        assert first.request_id == "r"
        assert other.requests() == []
        assert other.abort("r", "acme/r") == (0, 2)
        # The same name may be taken by both.
        ours = other.generate(PROMPT, request_id="r")
        assert next(ours).request_id == "r"
        assert [each.request_id for each in other.requests()] == ["r"]
        assert refused(lambda: list(other.generate(PROMPT, request_id="r"))).reason == "DUPLICATE_REQUEST"
        assert other.abort("r") == (1, 0)
        assert list(ours)[-1].finish_reason is FinishReason.ABORT
        assert [each.request_id for each in acme.requests()] == ["r"]
        acme.abort("r")
        assert list(theirs)[-1].finish_reason is FinishReason.ABORT


def test_a_name_has_less_room_beside_the_tenants(server: ToyServer) -> None:
    with of_tenant(server, ACME) as client:
        assert tokens_of(list(client.generate(PROMPT, request_id="r" * 123, max_tokens=1)))
        error = refused(lambda: list(client.generate(PROMPT, request_id="r" * 124, max_tokens=1)))
    assert error.code == "INVALID_ARGUMENT"
    assert "request_id has 124 bytes; those of this tenant have 123 at most" in error.sentence


def test_a_changed_file_lets_others_in_while_streams_go_on(server: ToyServer, tmp_path: Path) -> None:
    may_go_on, steps, execute = threading.Event(), itertools.count(), server.executor.execute

    def execute_slowly(*arguments: Any) -> Any:
        # After some steps the answer waits, or it would be complete before the file is looked at.
        assert next(steps) < 5 or may_go_on.wait(WAIT_SECONDS)
        return execute(*arguments)

    server.executor.execute = execute_slowly
    with of_tenant(server, ACME) as old, of_tenant(server, f"{ACME}-new") as new:
        stream = old.generate(PROMPT, request_id="r")
        next(stream)
        (tmp_path / "tokens.yaml").write_text(f"- {{tenant: acme, token: {ACME}-new, salt: pepper}}\n")

        def is_let_in() -> bool:
            try:
                return bool(new.requests())
            except OctavoError as error:
                assert error.code == "UNAUTHENTICATED"  # noqa: PT017 - until the file is looked at
                return False

        wait_until(is_let_in)
        assert refused(old.model).reason == "TOKEN_UNKNOWN"
        assert new.abort("r") == (1, 0)
        may_go_on.set()
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
        server.token = f"{ACME}-new"


def test_the_client_for_asyncio_has_tokens_too(server: ToyServer) -> None:
    async def ask() -> list[int]:
        async with AsyncClient(server.address, token=ACME, timeout=WAIT_SECONDS) as client:
            assert (await client.model()).model == "toy"
            return [
                token
                for chunk in [each async for each in client.generate(PROMPT, max_tokens=3)]
                for token in chunk.token_ids
            ]

    assert asyncio.run(ask()) == answer(PROMPT, 3)


def settings_of(directory: Path, **given: Any) -> ModelRunnerSettings:
    path = directory / "tokens.yaml"
    path.write_text(TOKENS)
    return load_settings(ModelRunnerSettings, {"auth_tokens": str(path), **given})


@pytest.mark.parametrize(
    ("given", "is_fine"),
    [
        ({"runner_address": "0.0.0.0:1"}, False),
        ({"runner_address": "[::]:1"}, False),
        ({"runner_address": "runner.example:1"}, False),
        ({"runner_address": "0.0.0.0:1", "allow_plaintext_tokens": True}, True),
        ({"runner_address": "0.0.0.0:1", "tls_cert": "c.pem", "tls_key": "k.pem"}, True),
        ({"runner_address": "127.0.0.2:1"}, True),
        ({"runner_address": "[::1]:1"}, True),
        ({"runner_address": "localhost:1"}, True),
        ({"runner_address": "unix:/run/r.sock"}, True),
    ],
)
def test_tokens_do_not_cross_a_network_in_the_clear(tmp_path: Path, given: dict[str, Any], is_fine: bool) -> None:
    settings = settings_of(tmp_path, **given)
    if is_fine:
        assert len(open_guards(settings)) == 1
        return
    with pytest.raises(StartupError, match=r"give --tls-cert and --tls-key, or --allow-plaintext-tokens"):
        open_guards(settings)


def test_a_hash_without_salts_keeps_no_tenants_apart(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--block-hash xxh3"):
        open_guards(settings_of(tmp_path, block_hash="xxh3"))


def test_without_a_file_there_is_no_guard() -> None:
    assert open_guards(load_settings(ModelRunnerSettings)) == ()


def test_the_tools_take_a_token_from_environment_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_AUTH_TOKEN", raising=False)
    path = tmp_path / "token"
    path.write_text(f"{ACME}\n")
    assert load_settings(ClientSettings).token() is None
    settings = load_settings(ClientSettings, {"auth_token_file": str(path)})
    assert settings.token() == ACME
    monkeypatch.setenv("OCTAVO_AUTH_TOKEN", OTHER)
    settings = load_settings(ClientSettings, {"auth_token_file": str(path)})
    assert settings.token() == OTHER
    assert OTHER not in repr(settings)


@pytest.mark.parametrize("content", [b"", b"\n", b"two words here", "schl\u00fcssel-0123456789".encode()])
def test_a_file_that_holds_no_token(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_AUTH_TOKEN", raising=False)
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(StartupError, match="holds no token") as caught:
        load_settings(ClientSettings, {"auth_token_file": str(path)}).token()
    assert "0123456789" not in str(caught.value)
