"""The chart's pod with certificates and tokens from Secrets: who is served, and `helm test` with its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.channels import ClientTls
from services.client import Client, OctavoError
from tests.e2e.stack import PATIENCE_SECONDS
from tests.e2e.tiny_chat_model import write_tiny_chat_model
from tests.helm.kubelet import Given, Kubelet
from tests.helm.manifests import NAMESPACE, Manifests, render
from tests.services.certificates import Certificates

TOKEN = "token-of-acme-in-the-test"
VALUES = {
    "model": {"source": "pvc", "path": "tiny", "pvc": {"existingClaim": "weights"}},
    "runner": {"settings": {"numBlocks": 512}},
    "termination": {"lameDuckSeconds": 0},
    "tls": {"secretName": "server", "clientAuth": True, "clientSecretName": "client"},
    "auth": {"tokensSecret": "tenants", "test": {"tokenSecret": "acme"}},
}


@dataclass(frozen=True)
class Secured:
    """The pod as it runs, and the files of its clients."""

    kubelet: Kubelet
    manifests: Manifests
    given: Given
    certificates: Certificates
    directory: Path

    def client(self, token: str | None) -> Client:
        path = self.certificates.path
        tls = ClientTls(path("ca.pem"), path("client.pem"), path("client.key"))
        return Client(self.kubelet.address("grpc"), tls=tls, token=token, timeout=PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    for name in ("certificates", "weights"):
        (directory / name).mkdir()
    certificates = Certificates(directory / "certificates")
    write_tiny_chat_model(directory / "weights" / "tiny")

    def pair(name: str) -> dict[str, str]:
        files = {"tls.crt": f"{name}.pem", "tls.key": f"{name}.key", "ca.crt": "ca.pem"}
        return {key: certificates.path(file).read_text() for key, file in files.items()}

    tenants = {"tokens.yaml": f"tokens:\n  - tenant: acme\n    token: {TOKEN}\n"}
    secrets = {"server": pair("server"), "client": pair("client"), "tenants": tenants, "acme": {"token": TOKEN}}
    given = Given(secrets=secrets, claims={"weights": directory / "weights"})
    manifests = render(directory, VALUES)
    [pod] = manifests.octavo_pods
    with Kubelet(pod, directory, given) as kubelet:
        kubelet.start()
        yield Secured(kubelet, manifests, given, certificates, directory)


def test_helm_test_shows_its_certificate_and_its_token(secured: Secured) -> None:
    [hook] = [pod for pod in secured.manifests.pods if pod.is_test]
    service = {f"demo-octavo.{NAMESPACE}.svc:50051": secured.kubelet.address("grpc")}
    (secured.directory / "test").mkdir()
    with Kubelet(hook, secured.directory / "test", Given(secured.given.secrets, services=service)) as test:
        assert test.complete()


@pytest.mark.parametrize("token", [None, "another"])
def test_without_its_token_nobody_is_served(secured: Secured, token: str | None) -> None:
    with secured.client(token) as client, pytest.raises(OctavoError) as caught:
        list(client.generate("Once", max_tokens=1))
    assert caught.value.code == "UNAUTHENTICATED"


def test_the_probes_need_neither(secured: Secured) -> None:
    assert secured.kubelet.is_ready()
    assert secured.kubelet.is_alive()


def test_no_log_has_the_token(secured: Secured) -> None:
    for name in ("kv-manager", "model-runner"):
        assert secured.kubelet[name].log
        assert TOKEN not in secured.kubelet[name].log
