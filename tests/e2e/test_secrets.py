"""Both services as processes over mutual TLS, with tokens: what is secret is nowhere that it may be read."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as kv_pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import ClientTls, open_channel
from services.client import Client, OctavoError
from services.client_retry import NO_RETRIES
from tests.e2e.stack import PATIENCE_SECONDS, SERVING, Process, free_port, health_of, run_octavo, wait_until
from tests.e2e.tiny_chat_model import write_tiny_chat_model
from tests.required import require_module
from tests.services.certificates import Certificates

ACME, OTHER, WRONG = "acme-token-0123456789", "other-token-0123456789", "wrong-token-0123456789"
SALT, SALT_SECRET, FOREIGN_SALT = "pepper-and-salt", "secret-behind-the-salts", "salt-of-somebody-else"
PROMPT, SYSTEM, SCHEMA = "the prompt of the day", "the word of the house", "a-schema-of-ours"
TOKENS = f"""
salt_secret: {SALT_SECRET}
tokens:
  - {{tenant: acme, token: {ACME}, salt: {SALT}}}
  - {{tenant: other, token: {OTHER}}}
"""


@dataclass(slots=True)
class Pair:
    """The two processes, and how they are reached."""

    directory: Path
    certificates: Certificates
    kv_address: str
    kv_metrics: str
    kv_health: str
    runner_address: str
    runner_metrics: str
    manager: Process
    runner: Process

    @property
    def tls(self) -> ClientTls:
        path = self.certificates.path
        return ClientTls(path("ca.pem"), path("client.pem"), path("client.key"))

    def client(self, token: str | None) -> Client:
        return Client(self.runner_address, tls=self.tls, token=token, timeout=PATIENCE_SECONDS, retry=NO_RETRIES)

    def tls_flags(self) -> list[str]:
        files = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
        return [f"--tls-{name}={self.certificates.path(file)}" for name, file in files.items()]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("secrets")
    certificates = Certificates(directory / "tls")
    (directory / "tokens.yaml").write_text(TOKENS)
    kv, kv_metrics, kv_health, runner, runner_metrics = (f"127.0.0.1:{free_port()}" for _ in range(5))
    files = {"cert": "server.pem", "key": "server.key", "client-ca": "ca.pem"}
    tls = [f"--tls-{name}={certificates.path(file)}" for name, file in files.items()]
    common = [*tls, f"--kv-address={kv}", "--log-level=debug", "--log-format=json"]
    manager = Process(
        directory, "kv-manager", *common, f"--kv-metrics-address={kv_metrics}", f"--kv-health-address={kv_health}"
    )
    serving = Process(
        directory,
        "model-runner",
        *common,
        f"--tls-ca={certificates.path('ca.pem')}",
        f"--runner-address={runner}",
        f"--runner-metrics-address={runner_metrics}",
        f"--auth-tokens={directory / 'tokens.yaml'}",
        f"--model={write_tiny_chat_model(directory / 'model')}",
        "--num-blocks=500",
    )
    made = Pair(directory, certificates, kv, kv_metrics, kv_health, runner, runner_metrics, manager, serving)
    try:
        # Probes speak neither TLS nor tokens.
        wait_until("the KV manager", lambda: health_of(kv_health, "readiness") == SERVING, manager)
        wait_until("serving", lambda: is_served(made), serving)
        yield made
    finally:
        serving.stop()
        manager.stop()


def is_served(made: Pair) -> bool:
    try:
        with made.client(ACME) as client:
            list(client.generate(PROMPT, max_tokens=1))
    except OctavoError as error:
        assert error.code == "UNAVAILABLE"  # noqa: PT017 - until it serves
        return False
    return True


def refused(call: Any) -> str:
    with pytest.raises(OctavoError) as caught:
        list(call())
    return f"{caught.value} {caught.value.metadata}"


def drive(pair: Pair) -> list[str]:
    """Requests of all kinds, good and bad; returns what clients were told where they were refused."""
    told = []
    with pair.client(ACME) as acme, pair.client(OTHER) as other, pair.client(WRONG) as wrong:
        for client in (acme, other, acme):
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]
            assert list(client.generate(chat=chat, max_tokens=4, pin_seconds=60))
            assert list(client.generate(PROMPT, max_tokens=40, stop=[SCHEMA]))
            client.tokenize(PROMPT)
        told += [
            refused(lambda: wrong.generate(PROMPT)),
            refused(lambda: pair.client(None).generate(PROMPT)),
            refused(lambda: acme.generate(PROMPT, cache_salt=FOREIGN_SALT)),
            refused(lambda: acme.generate(PROMPT, tenant="other")),
            refused(lambda: acme.generate(PROMPT, max_tokens=0)),
            refused(lambda: acme.generate(PROMPT * 200_000)),
            refused(lambda: acme.generate(PROMPT, regex=f"({SCHEMA}")),
            refused(lambda: acme.generate(chat=[{"role": "nobody", "content": PROMPT}], tools=[{"x": SYSTEM}])),
        ]
        live = acme.generate(PROMPT, request_id="live", ignore_eos=True)
        next(live)
        told.append(str(other.requests()))
        told.append(books_of(pair))
        acme.abort("live")
        list(live)
    return told


def books_of(pair: Pair) -> str:
    """What the KV manager shows to whoever may ask it, and what its tools print."""
    told = []
    with open_channel(pair.kv_address, pair.tls) as channel:
        stub = kv_manager_pb2_grpc.KvManagerServiceStub(channel)
        told.append(stub.GetPool(kv_pb.GetPoolRequest(), timeout=PATIENCE_SECONDS))
        sequences = stub.ListSequences(kv_pb.ListSequencesRequest(), timeout=PATIENCE_SECONDS)
        assert sequences.sequences
        told.append(sequences)
        told += [
            stub.GetBlockTable(kv_pb.GetBlockTableRequest(sequence_id=each.sequence_id), timeout=PATIENCE_SECONDS)
            for each in sequences.sequences
        ]
        told.append(stub.Check(kv_pb.CheckRequest(), timeout=PATIENCE_SECONDS))
        watch = stub.WatchEvents(kv_pb.WatchEventsRequest(from_number=1), timeout=PATIENCE_SECONDS)
        told.append(next(watch))
        watch.cancel()
        scope = kv_pb.CacheScope(salt=FOREIGN_SALT)
        stub.RemovePrefix(kv_pb.RemovePrefixRequest(token_ids=[1] * 16, scope=scope), timeout=PATIENCE_SECONDS)
        with pytest.raises(grpc.RpcError) as caught:
            stub.SetQuota(kv_pb.SetQuotaRequest(salt=FOREIGN_SALT, max_blocks=-1), timeout=PATIENCE_SECONDS)
        told.append(caught.value)
    return "\n".join(map(str, told))


def metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as answer:
        return str(answer.read().decode())


def key_lines(path: Path) -> list[str]:
    lines = [line for line in path.read_text().splitlines() if line and "-----" not in line]
    assert lines
    return lines


def test_secrets_are_nowhere_to_be_read(pair: Pair) -> None:
    told = drive(pair)
    # A new file that cannot be taken is logged; an old one that comes back is too.
    (pair.directory / "tokens.yaml").write_text(TOKENS + f"  - {{tenant: third, token: {WRONG}, colour: red}}\n")

    def asked_again(word: str) -> bool:
        with pair.client(ACME) as client:
            client.model()
        return word in pair.runner.log

    wait_until("the refusal of the file", lambda: asked_again("the tokens stay as they were"), pair.runner)
    (pair.directory / "tokens.yaml").write_text(TOKENS)
    wait_until("the file's return", lambda: asked_again("tokens read again"), pair.runner)
    # A tool that fails says nothing of what it was given either.
    done = run_octavo(
        *("generate", PROMPT, "--address", pair.runner_address, *pair.tls_flags()),
        OCTAVO_AUTH_TOKEN=WRONG,
        OCTAVO_SALT=FOREIGN_SALT,
    )
    assert done.returncode == 2
    assert "The token is none of this server's" in done.stderr
    places = {
        "the KV manager's log": pair.manager.log,
        "the runner's log": pair.runner.log,
        "the KV manager's metrics": metrics_of(pair.kv_metrics),
        "the runner's metrics": metrics_of(pair.runner_metrics),
        "what clients were told": "\n".join(told),
        "a tool's output": done.stdout + done.stderr,
    }
    for name, needle in (
        ("the KV manager's log", "kv-manager facts"),
        ("the runner's log", "model-runner serves"),
        ("the KV manager's metrics", "octavo_kv_blocks"),
        ("the runner's metrics", 'tenant="acme"'),
        ("what clients were told", "acme/live/0"),
    ):
        assert needle in places[name], f"{name} was not read"
    keys = [line for name in ("server", "client") for line in key_lines(pair.certificates.path(f"{name}.key"))]
    secrets = [ACME, OTHER, WRONG, SALT, SALT_SECRET, FOREIGN_SALT, PROMPT, SYSTEM, SCHEMA, *keys]
    found = [(name, secret) for name, text in places.items() for secret in secrets if secret in text]
    assert found == []
    pool = run_octavo("check", f"--kv-address={pair.kv_address}", *pair.tls_flags())
    assert pool.returncode == 0, pool.stderr


def test_tools_have_a_token_from_a_file(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{ACME}\n")
    os.chmod(path, 0o600)
    common = ("--address", pair.runner_address, *pair.tls_flags(), "--auth-token-file", str(path))
    done = run_octavo("generate", "Hello", *common, "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    done = run_octavo("requests", *common)
    assert done.stdout == "No request is live.\n"


def test_a_runner_says_why_it_cannot_reach_its_kv_manager(pair: Pair, tmp_path: Path) -> None:
    strangers = Certificates(tmp_path / "tls")
    runner = Process(
        tmp_path,
        "model-runner",
        *(f"--kv-address={pair.kv_address}", f"--tls-ca={strangers.path('ca.pem')}"),
        *("--runner-address", f"unix:{tmp_path}/r.sock", "--runner-metrics-address", "127.0.0.1:0"),
        *("--model", str(pair.directory / "model"), "--num-blocks=500", "--log-format=json"),
    )
    try:
        wait_until("the warning", lambda: "cannot reach the KV manager" in runner.log, runner)
        assert "its certificate is refused (unable to get local issuer certificate)" in runner.log
    finally:
        runner.stop()


def test_the_gateways_contract_has_the_same_guard(pair: Pair) -> None:
    require_module("smg_grpc_proto", "pip install 'octavo[gateway]'")
    from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

    def request(request_id: str, max_tokens: int) -> vllm_engine_pb2.GenerateRequest:
        sampling = vllm_engine_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        tokenized = vllm_engine_pb2.TokenizedInput(input_ids=list(b"x" * 40))
        return vllm_engine_pb2.GenerateRequest(
            request_id=request_id, tokenized=tokenized, sampling_params=sampling, stream=True
        )

    with open_channel(pair.runner_address, pair.tls) as channel, pair.client(ACME) as acme:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        patience: dict[str, Any] = {"timeout": PATIENCE_SECONDS}
        assert stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), **patience).healthy
        for call in (
            lambda: list(stub.Generate(request("r", 1), **patience)),
            lambda: stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r"]), **patience),
            lambda: stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), **patience),
            lambda: next(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), **patience)),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED

        def by(token: str) -> dict[str, Any]:
            return patience | {"metadata": (("authorization", f"Bearer {token}"),)}

        stream = stub.Generate(request("r", 400), **by(ACME))
        next(stream)
        # It is that tenant's, by whatever contract; another one can't end it.
        assert [(each.request_id, each.tenant) for each in acme.requests()] == [("r", "acme")]
        stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r", "acme/r"]), **by(OTHER))
        assert [each.request_id for each in acme.requests()] == ["r"]
        stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r"]), **by(ACME))
        assert list(stream)[-1].complete.finish_reason == "abort"
        # What another tenant has cached is computed anew.
        cached = [
            list(stub.Generate(request(f"c{index}", 1), **by(token)))[-1].complete.cached_tokens
            for index, token in enumerate((ACME, OTHER, OTHER))
        ]
        assert cached == [32, 0, 32]


def test_both_start_together_with_tls_and_tokens(pair: Pair, tmp_path: Path) -> None:
    """A certificate serves both, and is what the runner and the demo show."""
    files = {"cert": "server.pem", "key": "server.key", "client-ca": "ca.pem", "ca": "ca.pem"}
    arguments = [
        *(f"--tls-{name}={pair.certificates.path(file)}" for name, file in files.items()),
        *("--demo", "--once", "--num-blocks=500", f"--model={pair.directory / 'model'}"),
        *(f"--auth-tokens={pair.directory / 'tokens.yaml'}", f"--kv-address=unix:{tmp_path}/kv.sock"),
        *(f"--runner-address=127.0.0.1:{free_port()}", "--log-level=debug"),
        *("--runner-metrics-address=127.0.0.1:0", "--kv-metrics-address=127.0.0.1:0"),
    ]
    done = run_octavo("up", *arguments)
    assert done.returncode == 2
    assert done.stderr == "octavo: --demo asks the runner, and with --auth-tokens needs a token in OCTAVO_AUTH_TOKEN.\n"
    done = run_octavo("up", *arguments, OCTAVO_AUTH_TOKEN=ACME)
    assert done.returncode == 0, done.stderr
    assert " tokens at " in done.stdout
    assert [secret for secret in (ACME, OTHER, SALT, SALT_SECRET) if secret in done.stdout + done.stderr] == []
