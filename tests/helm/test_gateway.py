"""The chart's gateway and a pod with TLS and tokens, as rendered: the real smg finds it and serves by its door."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from services.channels import ClientTls, open_channel
from tests.e2e.stack import PATIENCE_SECONDS, free_port, wait_until
from tests.helm.kubelet import Given, Kubelet
from tests.helm.manifests import NAMESPACE, Json, Manifests, Pod, render
from tests.helm.stand_in_api import StandInApi
from tests.helm.stand_in_http import serving
from tests.helm.stand_in_resources import BUILT_IN
from tests.required import require_program
from tests.services.certificates import Certificates
from tests.services.kv_support import scrape

KEY = "key-of-the-gateway-test"
TOKEN = "token-of-web-in-the-gateway-test"
VALUES = {
    "tls": {"secretName": "server"},
    "auth": {"tokensSecret": "tenants"},
    "gateway": {"enabled": True, "apiKeySecret": "keys", "tenant": "web"},
    "runner": {"settings": {"numBlocks": 512, "numThreads": 1}},
    "termination": {"lameDuckSeconds": 0},
}
PODS = next(each for each in BUILT_IN if each.kind == "Pod")
SECRETS = {("keys", "api-key"): KEY}


def environment(container: Json) -> dict[str, str]:
    """A container's variables, with the Secret of the test."""
    found = {}
    for each in container["env"]:
        secret = each.get("valueFrom", {}).get("secretKeyRef")
        found[each["name"]] = SECRETS[secret["name"], secret["key"]] if secret else each["value"]
    return found


def own_ports(words: list[str], ports: dict[str, int]) -> list[str]:
    """Arguments with loopback for every address, and ports of `ports` instead of those that they have."""
    swapped = (re.sub(r"=(\d+)$", lambda port: f"={ports.get(port[1], port[1])}", word) for word in words)
    return [word.replace("=0.0.0.0", "=127.0.0.1") for word in swapped]


@dataclass
class Gateway:
    """smg as a process, the API that it watches, the pod behind it, and the rendered objects."""

    api: StandInApi
    kubelet: Kubelet
    certificates: Certificates
    process: subprocess.Popen[bytes]
    log: Path
    ports: dict[str, int]
    manifests: Manifests
    container: Json

    def status(self, probe: str) -> int | None:
        """What a probe of the container gets; None when nobody answers."""
        asked = self.container[probe]["httpGet"]
        named = {port["name"]: str(port["containerPort"]) for port in self.container["ports"]}
        url = f"http://127.0.0.1:{self.ports[named[asked['port']]]}{asked['path']}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def wait_for(self, probe: str, status: int) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.status(probe) == status

        wait_until(f"{probe} {status} of the gateway", reached)

    def helm_test(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs the script of the pod that `helm test` makes."""
        (pod,) = [pod for pod in self.manifests.pods if pod.containers[0]["name"] == "ask"]
        (script,) = pod.containers[0]["args"]
        env = environment(pod.containers[0]) | {"GATEWAY_URL": f"http://127.0.0.1:{self.ports['30000']}"} | env
        return subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=False
        )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    smg = require_program("smg", "pip install 'octavo[gateway]'")
    directory = tmp_path_factory.mktemp("gateway")
    certificates = Certificates(directory / "certificates")
    files = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}
    secrets = {
        "server": {key: certificates.path(file).read_text() for key, file in files.items()},
        "tenants": {"tokens.yaml": f"[{{tenant: web, token: {TOKEN}}}, {{tenant: acme, token: another-{TOKEN}}}]"},
    }
    manifests = render(directory, VALUES)
    (pod,) = [pod for pod in manifests.pods if pod.containers[0]["name"] == "smg"]
    (server,) = manifests.octavo_pods
    container = pod.containers[0]
    ports = {port: free_port() for port in ("30000", "30001", "29000")}
    variables = environment(container)
    words = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in container["args"]]
    api = StandInApi("1.33")
    log = directory / "smg.log"
    with (
        Kubelet(server, directory, Given(secrets)) as kubelet,
        serving(api, directory) as kubeconfig,
        log.open("wb") as output,
    ):
        kubelet.start()
        ports |= {str(port): here for port, here in kubelet.ports.items()}
        process = subprocess.Popen(
            [smg, *own_ports(words, ports)],
            env={"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig)} | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Gateway(api, kubelet, certificates, process, log, ports, manifests, container)
        finally:
            process.kill()
            process.wait()


def running(pod: Pod) -> Json:
    """The pod as a kubelet tells of it when it is ready, at this machine's address."""
    status = {"phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "demo-1", "labels": pod.labels}, "spec": pod.spec, "status": status}


def test_it_lives_but_is_not_ready_without_a_pod(gateway: Gateway) -> None:
    gateway.wait_for("startupProbe", 200)
    assert gateway.status("livenessProbe") == 200
    assert gateway.status("readinessProbe") == 503


def test_it_finds_a_pod_of_the_release_and_helm_test_streams_from_it(gateway: Gateway) -> None:
    (server,) = gateway.manifests.octavo_pods
    gateway.api.store.put(PODS, NAMESPACE, running(server))
    gateway.wait_for("readinessProbe", 200)
    done = gateway.helm_test()
    assert done.returncode == 0, done.stderr
    model, _, text = done.stdout.strip().partition(": ")
    assert model == "SmolLM2-135M-Instruct"
    assert re.fullmatch(r"The capital of France is.+", text)


def test_its_requests_are_those_of_its_tenant(gateway: Gateway) -> None:
    metrics = scrape(gateway.kubelet.address("runner-metrics"))
    tenants = {dict(labels)["tenant"] for name, labels in metrics if name == "octavo_runner_tenant_requests_total"}
    assert tenants == {"web"}


@pytest.mark.parametrize(
    ("port", "method"),
    [
        ("grpc", "/vllm.grpc.engine.VllmEngine/HealthCheck"),
        ("vllm", "/octavo.runner.v1.ModelRunnerService/GetModel"),
        ("vllm", "/grpc.health.v1.Health/Check"),
    ],
)
def test_the_door_has_its_contract_alone_and_nobody_else_has_it(gateway: Gateway, port: str, method: str) -> None:
    tls = ClientTls(gateway.certificates.path("ca.pem")) if port == "grpc" else None
    token = [("authorization", f"Bearer {TOKEN}")]
    with open_channel(gateway.kubelet.address(port), tls) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"", metadata=token, timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_without_the_key_nobody_is_served(gateway: Gateway) -> None:
    done = gateway.helm_test(GATEWAY_KEY="another")
    assert done.returncode != 0
    assert "401" in done.stderr


def test_a_pod_that_is_gone_is_gone_from_the_gateway(gateway: Gateway) -> None:
    assert gateway.api.store.delete(PODS, NAMESPACE, "demo-1")
    gateway.wait_for("readinessProbe", 503)
    assert gateway.status("livenessProbe") == 200


def test_the_key_is_in_no_log(gateway: Gateway) -> None:
    assert "Registering worker" in gateway.log.read_text()
    assert KEY not in gateway.log.read_text()
    assert TOKEN not in gateway.kubelet["model-runner"].log
