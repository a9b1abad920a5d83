"""`octavo up --gateway`: three processes, one command, and the OpenAI client."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from services.addresses import TcpAddress
from services.gateway import openai_url, reachable, why_not_ready
from tests.e2e.stack import SERVING, Process, free_port, health_of, run_octavo, wait_until
from tests.gateway.needed import need
from tests.services.kv_support import scrape

need("smg", "smg_grpc_proto", "openai")

import openai  # noqa: E402

TOKEN = "a-token-of-the-gateway-test"


def test_an_openai_client_is_served_until_ctrl_c(tmp_path: Path) -> None:
    """With tokens, which a gateway can't send: its requests are those of a tenant, at an address of its own."""
    runner, gateway, metrics, door, runner_metrics = (f"127.0.0.1:{free_port()}" for _ in range(5))
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"[{{tenant: web, token: {TOKEN}}}, {{tenant: acme, token: another-{TOKEN}}}]")
    up = Process(
        tmp_path,
        "up",
        "--gateway",
        *("--gateway-address", gateway, "--gateway-metrics-address", metrics, "--runner-address", runner),
        *("--kv-address", f"unix:{tmp_path}/kv.sock", "--num-blocks", "64", "--num-threads", "1"),
        *("--auth-tokens", str(tokens), "--vllm-address", door, "--vllm-tenant", "web"),
        *("--runner-metrics-address", runner_metrics),
        afresh=True,
    )
    wait_until("the gateway's address", lambda: f"at http://{gateway}/v1" in up.log, up)
    client = openai.OpenAI(base_url=f"http://{gateway}/v1", api_key="any", max_retries=0, timeout=120)
    (model,) = client.models.list().data
    answer = client.chat.completions.create(
        model=model.id,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    ended = ("octavo_runner_tenant_requests_total", (("tenant", "web"),))
    assert scrape(runner_metrics)[ended] == 1
    # What is cached of it is the tenant's, and its gateway knows.
    wait_until("the gateway's index", lambda: _indexed(metrics) == 2)
    # The door is a further one.
    assert health_of(runner, "vllm.grpc.engine.VllmEngine") == SERVING
    refused = run_octavo("generate", "Hello", "--address", runner)
    assert (refused.returncode, "UNAUTHENTICATED" in refused.stderr) == (2, True), refused.stderr
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as scraped:
        assert b"smg_kv_index_blocks" in scraped.read()
    up.signal(signal.SIGINT)
    assert up.wait() == 0
    assert health_of(runner) is None
    assert why_not_ready(gateway) == "it does not answer"
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("--runner-address", "unix:/tmp/octavo-gateway-test.sock"),
            "give --runner-address host:port, or --vllm-address",
        ),
        (("--no-vllm-grpc",), "--no-vllm-grpc leaves out: give --vllm-address"),
        (("--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-ca", "ca.pem"), "smg speaks no TLS to runners"),
        (("--auth-tokens", "tokens.yaml"), "smg sends runners no token"),
        (("--gateway-address", "unix:/tmp/gateway.sock"), "is no address"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    runner = f"127.0.0.1:{free_port()}"
    done = run_octavo(
        "up", "--gateway", "--runner-address", runner, "--kv-address", f"unix:{tmp_path}/kv.sock", *arguments
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--vllm-address", "127.0.0.1:0", "--auth-tokens", "TOKENS"), "say by --vllm-tenant whose its requests are"),
        (("--vllm-address", "127.0.0.1:0", "--vllm-tenant", "web"), "--vllm-tenant is one of --auth-tokens"),
        (("--vllm-tenant", "web", "--auth-tokens", "TOKENS"), "at --vllm-address are: give that too"),
        (
            ("--vllm-address", "127.0.0.1:0", "--vllm-tenant", "nobody", "--auth-tokens", "TOKENS"),
            "is that tenant's",
        ),
    ],
)
def test_a_runner_whose_gateways_have_no_tenant_does_not_start(
    tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"[{{tenant: web, token: {TOKEN}}}]")
    done = run_octavo(
        "model-runner",
        *("--runner-address", f"unix:{tmp_path}/runner.sock", "--runner-metrics-address", "127.0.0.1:0"),
        *("--kv-address", f"unix:{tmp_path}/kv.sock", "--log-level", "error"),
        *(str(tokens) if word == "TOKENS" else word for word in arguments),
    )
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def _indexed(metrics: str) -> int:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
        found = re.search(r"^smg_kv_index_blocks\{.*\} (\d+)", answer.read().decode(), re.M)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    ("listens", "reached", "url"),
    [
        ("0.0.0.0:30000", "127.0.0.1:30000", "http://127.0.0.1:30000/v1"),
        ("[::]:30000", "[::1]:30000", "http://[::1]:30000/v1"),
        ("10.1.2.3:80", "10.1.2.3:80", "http://10.1.2.3:80/v1"),
    ],
)
def test_where_a_server_is_reached(listens: str, reached: str, url: str) -> None:
    host, _, port = listens.rpartition(":")
    assert str(reachable(TcpAddress(host.strip("[]"), int(port)))) == reached
    assert openai_url(listens) == url
