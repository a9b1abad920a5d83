"""The stand-in API where a cluster's behaviour is known: patches, selectors, protobuf, and what it refuses."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm import stand_in_protobuf
from tests.helm.stand_in_api import StandInApi
from tests.helm.stand_in_http import serving
from tests.helm.stand_in_patch import merge_patch, server_side_apply, strategic_merge_patch
from tests.helm.stand_in_resources import BUILT_IN
from tests.helm.stand_in_store import Selection, Store
from tests.helm.tools import kubectl

DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "web", "labels": {"app": "web"}},
    "spec": {
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "web", "image": "web:1"}]},
        },
    },
}


@dataclass(frozen=True)
class Cluster:
    """A stand-in that serves, and where."""

    api: StandInApi
    url: str

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """(code, object, warnings) of a request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": content_type}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer), answer.headers.get_all("Warning") or []
        except urllib.error.HTTPError as error:
            return error.code, json.load(error), []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    api = StandInApi("1.33")
    with serving(api, tmp_path) as kubeconfig:
        yield Cluster(api, yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"


def test_merge_patch_does_what_the_rfc_shows() -> None:
    # The example of RFC 7396, section 3.
    document = {
        "title": "Goodbye!",
        "author": {"givenName": "John", "familyName": "Doe"},
        "tags": ["example", "sample"],
        "content": "This will be unchanged",
    }
    patch = {
        "title": "Hello!",
        "phoneNumber": "+01-123-456-7890",
        "author": {"familyName": None},
        "tags": ["example"],
    }
    assert merge_patch(document, patch) == {
        "title": "Hello!",
        "author": {"givenName": "John"},
        "tags": ["example"],
        "content": "This will be unchanged",
        "phoneNumber": "+01-123-456-7890",
    }


def test_strategic_merge_patch_changes_one_container_and_removes_one_variable() -> None:
    # After the examples of Kubernetes' documentation of strategic merge patches.
    pod = {
        "containers": [{"name": "a", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]}, {"name": "b"}]
    }
    patch = {
        "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}],
        "containers": [{"name": "a", "image": "new", "env": [{"name": "X", "$patch": "delete"}]}],
    }
    assert strategic_merge_patch(pod, patch) == {
        "containers": [{"name": "b"}, {"name": "a", "image": "new", "env": [{"name": "Y", "value": "2"}]}]
    }


def test_server_side_apply_removes_what_the_applier_no_longer_wants_and_nothing_of_others() -> None:
    before = {"labels": {"a": "1", "b": "2"}, "containers": [{"name": "x", "args": ["1"]}, {"name": "y"}]}
    current = {
        "labels": {"a": "1", "b": "2", "theirs": "3"},
        "containers": [{"name": "x", "args": ["1"], "injected": True}, {"name": "y"}, {"name": "sidecar"}],
        "status": "kept",
    }
    wanted = {"labels": {"a": "9"}, "containers": [{"name": "x", "args": ["2", "3"]}]}
    assert server_side_apply(current, before, wanted) == {
        "labels": {"a": "9", "theirs": "3"},
        "containers": [{"name": "x", "args": ["2", "3"], "injected": True}, {"name": "sidecar"}],
        "status": "kept",
    }


def test_a_secret_in_protobuf_is_read_field_by_field() -> None:
    # Written by hand: 0x0a is field 1 as bytes, 0x12 field 2, 0x1a field 3, 0x5a field 11; then the length.
    label = b"\x5a\x0d" + b"\x0a\x05owner" + b"\x12\x04helm"
    metadata = b"\x0a\x02s1" + b"\x1a\x04prod" + label
    entry = b"\x12\x0a" + b"\x0a\x01k" + b"\x12\x05hello"
    secret = b"\x0a" + bytes([len(metadata)]) + metadata + entry + b"\x1a\x06Opaque"
    types = b"\x0a\x02v1" + b"\x12\x06Secret"
    raw = b"k8s\0" + b"\x0a" + bytes([len(types)]) + types + b"\x12" + bytes([len(secret)]) + secret
    assert stand_in_protobuf.decode(raw) == {
        "kind": "Secret",
        "apiVersion": "v1",
        "metadata": {"name": "s1", "namespace": "prod", "labels": {"owner": "helm"}},
        "data": {"k": base64.b64encode(b"hello").decode()},
        "type": "Opaque",
    }


@pytest.mark.parametrize(
    ("labels", "found"),
    [("", True), ("a=1", True), ("a==1,b", True), ("a!=1", False), ("!c", True), ("c", False), ("a=1,b=9", False)],
)
def test_label_selectors(labels: str, found: bool) -> None:
    pods = next(each for each in BUILT_IN if each.kind == "Pod")
    item = {"metadata": {"name": "p", "namespace": "n", "labels": {"a": "1", "b": "2"}}}
    assert Selection(pods, "n", labels).has(pods, item) is found
    assert not Selection(pods, "other", labels).has(pods, item)


def test_a_deployment_is_made_changed_and_deleted_with_its_replica_sets(cluster: Cluster) -> None:
    code, made, _ = cluster.call("POST", DEPLOYMENTS, DEPLOYMENT)
    assert (code, made["spec"]["replicas"], made["status"]["readyReplicas"]) == (201, 1, 1)
    assert cluster.call("POST", DEPLOYMENTS, DEPLOYMENT)[0] == 409
    code, changed, _ = cluster.call(
        "PATCH", f"{DEPLOYMENTS}/web", {"spec": {"replicas": 3}}, "application/merge-patch+json"
    )
    assert (code, changed["metadata"]["generation"], changed["status"]["readyReplicas"]) == (200, 2, 3)
    assert cluster.api.kinds() == ["Deployment", "ReplicaSet"]
    assert cluster.api.one("ReplicaSet")["status"]["readyReplicas"] == 3
    assert cluster.call("DELETE", f"{DEPLOYMENTS}/web")[0] == 200
    assert cluster.api.kinds() == []
    assert cluster.call("GET", f"{DEPLOYMENTS}/web")[0] == 404


def test_an_old_replica_set_is_scaled_down(cluster: Cluster) -> None:
    cluster.call("POST", DEPLOYMENTS, DEPLOYMENT)
    image = {"spec": {"template": {"spec": {"containers": [{"name": "web", "image": "web:2"}]}}}}
    cluster.call("PATCH", f"{DEPLOYMENTS}/web", image, "application/strategic-merge-patch+json")
    sets = [each for each in cluster.api.store.all() if each["kind"] == "ReplicaSet"]
    by_image = {each["spec"]["template"]["spec"]["containers"][0]["image"]: each["spec"]["replicas"] for each in sets}
    assert by_image == {"web:1": 0, "web:2": 1}


def test_an_unknown_field_is_refused_strictly_and_else_dropped_with_a_warning(cluster: Cluster) -> None:
    misspelt = json.loads(json.dumps(DEPLOYMENT))
    misspelt["spec"]["template"]["spec"]["terminationGracePeriodSecs"] = 5
    code, answer, _ = cluster.call("POST", f"{DEPLOYMENTS}?fieldValidation=Strict", misspelt)
    assert code == 400
    assert "strict decoding error: spec.template.spec" in answer["message"]
    assert "'terminationGracePeriodSecs' was unexpected" in answer["message"]
    code, kept, warnings = cluster.call("POST", DEPLOYMENTS, misspelt)
    assert code == 201
    assert warnings == ['299 - "unknown field \\"spec.template.spec.terminationGracePeriodSecs\\""']
    assert "terminationGracePeriodSecs" not in kept["spec"]["template"]["spec"]


def test_a_wrong_type_is_refused_always(cluster: Cluster) -> None:
    wrong = json.loads(json.dumps(DEPLOYMENT))
    wrong["spec"]["replicas"] = "three"
    code, answer, _ = cluster.call("POST", DEPLOYMENTS, wrong)
    assert code == 400
    assert "spec.replicas: 'three' is not of type" in answer["message"]


def test_kubectl_lists_what_there_is(tmp_path: Path) -> None:
    api = StandInApi("1.33")
    with serving(api, tmp_path) as kubeconfig:
        (tmp_path / "web.yaml").write_text(yaml.safe_dump(DEPLOYMENT))
        made = kubectl("create", "-f", tmp_path / "web.yaml", home=tmp_path, kubeconfig=kubeconfig)
        assert made.stdout == "deployment.apps/web created\n", made.stderr
        listed = kubectl("get", "deploy,rs", "-o", "name", home=tmp_path, kubeconfig=kubeconfig)
        assert listed.stdout.split()[0] == "deployment.apps/web"
        assert listed.stdout.split()[1].startswith("replicaset.apps/web-")


def test_a_watch_begins_with_what_has_happened_after_the_version_that_it_names() -> None:
    pods = next(each for each in BUILT_IN if each.kind == "Pod")
    store = Store()
    for name in ("a", "b"):
        listed = store.version
        store.put(pods, "here", {"metadata": {"name": name}, "status": {"podIP": "127.0.0.1"}})
    store.put(pods, "there", {"metadata": {"name": "c"}, "status": {"podIP": "127.0.0.1"}})
    store.delete(pods, "here", "a")
    with store.watch(Selection(pods, "here"), listed) as watch:
        told = [watch.events.get_nowait() for _ in range(watch.events.qsize())]
    assert [(kind, item["metadata"]["name"]) for kind, item in told] == [("ADDED", "b"), ("DELETED", "a")]
