"""Each check of the rendered chart finds a template that is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.cases import rendered
from tests.helm.checks_references import missing_references
from tests.helm.custom_resources import custom_faults
from tests.helm.planted import Break, Objects, argument, broken, container, drop, in_container, set_in
from tests.helm.schemas import strict_faults
from tests.helm.test_matrix import CROSS_CHECKS, schema_faults

Json = dict[str, Any]


def grpc_probe(port: Any) -> Json:
    return {"grpc": {"port": port, "service": "liveness"}}


CROSS_FAULTS: list[tuple[Break, str]] = [
    (set_in("Service", "spec", "selector", "app.kubernetes.io/name", to="other"), "selects no pod"),
    (
        set_in("PodDisruptionBudget", "spec", "selector", "matchLabels", to={"a": "b"}),
        "PodDisruptionBudget demo-octavo selects no pod",
    ),
    (set_in("PodMonitor", "spec", "selector", to={"matchLabels": {}}), "selects the pods of"),
    (
        set_in("NetworkPolicy", "spec", "podSelector", "matchLabels", to={"a": "b"}),
        "NetworkPolicy demo-octavo selects no pod",
    ),
    (set_in("Deployment", "spec", "selector", "matchLabels", "x", to="y"), "does not select its own pods"),
    (
        set_in("Deployment", "spec", "selector", "matchLabels", "helm.sh/chart", to="octavo-0"),
        "which an upgrade changes",
    ),
    (
        set_in("pod", "spec", "topologySpreadConstraints", 0, "labelSelector", to={"matchLabels": {"a": "b"}}),
        "not its own",
    ),
    (set_in("Service", "spec", "ports", 0, "targetPort", to="http"), "leads to port http"),
    (set_in("Service", "spec", "ports", 0, "targetPort", to=8080), "leads to port 8080"),
    (set_in("PodMonitor", "spec", "podMetricsEndpoints", 0, "port", to="metrics"), "leads to port metrics"),
    (drop("PodMonitor", "spec", "podMetricsEndpoints", 0), "does not scrape"),
    (in_container("livenessProbe", grpc_probe("runner-health")), "a gRPC probe needs a number"),
    (in_container("livenessProbe", grpc_probe(50053)), "50053, which is no port of the container"),
    (argument("--runner-health-address", "--runner-health-address=127.0.0.1:50052"), "on which nothing listens"),
    (argument("--runner-address", "--runner-address=0.0.0.0:50055"), "listens on port 50055, but not both"),
    (argument("--kv-metrics-address", "--kv-metrics-address=0.0.0.0:9402", "kv-manager"), "port 9401, but not both"),
    (in_container("ports", [{"name": "grpc", "containerPort": 9401}]), "has port 9401 twice"),
    (in_container("ports", [{"name": "a-name-of-sixteen", "containerPort": 50051}]), "more than 15 characters"),
    (set_in("NetworkPolicy", "spec", "ingress", 0, "ports", 0, "port", to=50052), "lets anybody to port grpc"),
    (set_in("NetworkPolicy", "spec", "ingress", to=[]), "lets anybody to port kv-metrics"),
    (set_in("NetworkPolicy", "spec", "egress", to=[]), "ask for names"),
    (
        set_in("NetworkPolicy", "spec", "ingress", 0, "ports", 0, "port", to=1),
        "NetworkPolicy demo-octavo leads to port 1",
    ),
    (argument("--log-format", "--log-fromat=json"), "No such option: --log-fromat"),
    (argument("--log-format", "--log-format=xml"), "--log-format"),
    (argument("model-runner", "modelrunner"), "No such command: modelrunner"),
    (in_container("command", ["bash", "-c"]), "bash is no program"),
    (lambda objects: container(objects).update(command=["python3", "-c"], args=["print('"]), "python3: unterminated"),
    (lambda objects: container(objects).update(command=["python3"], args=["run", "1"]), "python3 has run, not -c"),
    (in_container("lifecycle", {"preStop": {"exec": {"command": ["octavo", "drain", "--seconds=3"]}}}), "--seconds"),
    (argument("--grace-seconds", "--log-level=info"), "has no --grace-seconds"),
    (in_container("env", [{"name": "OCTAVO_LOG_FROMAT", "value": "json"}]), "no program reads OCTAVO_LOG_FROMAT"),
    (in_container("env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]), "A is there twice"),
    (in_container("restartPolicy", None, "kv-manager"), "is not kept up"),
    (lambda objects: container(objects, "kv-manager").pop("startupProbe"), "has no startupProbe"),
    (
        argument("--kv-address", "--kv-address=unix:/run/octavo/other.sock"),
        "the runner looks at unix:/run/octavo/other.sock",
    ),
    (argument("--runner-admin-address", "--runner-admin-address=unix:/var/admin.sock"), "no volume for its socket"),
    (argument("--runner-admin-address", "--runner-admin-address=unix:/run/octavo/x.sock"), "which is not the runner's"),
    (in_container("volumeMounts", [{"name": "tmp", "mountPath": "/run/octavo"}]), "different volumes"),
    (lambda objects: container(objects).pop("lifecycle"), "nothing drains the runner"),
    (set_in("pod", "spec", "terminationGracePeriodSeconds", to=30), "is 30, and stopping takes up to 140"),
    (drop("pod", "spec", "terminationGracePeriodSeconds"), "is 30, and stopping takes up to 140"),
    (in_container("volumeMounts", [{"name": "nowhere", "mountPath": "/run/octavo"}]), "which is no volume"),
    (in_container("volumeMounts", [{"name": n, "mountPath": "/run/octavo"} for n in ("run", "tmp")]), "two volumes at"),
    (
        lambda objects: objects["pod"]["spec"]["volumes"].append({"name": "idle", "emptyDir": {}}),
        "nobody mounts the volume idle",
    ),
    (
        lambda objects: objects["pod"]["spec"]["volumes"].append({"name": "run", "emptyDir": {}}),
        "the volume run is there twice",
    ),
    (set_in("Pod", "metadata", "namespace", to="default"), "is in the namespace default"),
    (drop("Service", "metadata", "labels", "app.kubernetes.io/instance"), "lacks the label app.kubernetes.io/instance"),
    (drop("Service", "metadata", "labels", "helm.sh/chart"), "lacks the label helm.sh/chart"),
    (set_in("pod", "spec", "automountServiceAccountToken", to=True), "gets a token of the API"),
    (in_container("resources", {"limits": {"memory": "1Gi"}}), "requests no CPU or no memory"),
    (in_container("resources", {"requests": {"cpu": 1, "memory": 1}}), "has no memory limit"),
    (in_container("image", "localhost:5000/octavo:latest"), "which may change"),
    (in_container("image", "localhost:5000/octavo"), "which may change"),
    (drop("Pod", "metadata", "annotations", "helm.sh/hook-delete-policy"), "a hook, is left behind"),
]


RUNNER, GATEWAY = "NetworkPolicy demo-octavo", "NetworkPolicy demo-octavo-gateway"
DOOR: list[tuple[Break, str]] = [
    (argument("--vllm-address", "--vllm-address=0.0.0.0:50055"), "the door of Deployment demo-octavo is at 50055"),
    (argument("--vllm-address", "--vllm-address=127.0.0.1:50054"), "listens on port 50054, but not both"),
    (argument("--vllm-tenant", "--vllm-tenent=web"), "No such option: --vllm-tenent"),
    (
        argument("--service-discovery-port", "--service-discovery-port=50051", "smg"),
        "looks at port 50051, and the door",
    ),
    (
        argument("app.kubernetes.io/name", "app.kubernetes.io/name=other", "smg"),
        "Deployment demo-octavo-gateway looks for []",
    ),
    (in_container("command", ["octavo"], "smg"), "and there is no gateway"),
    (
        set_in("Service demo-octavo", "spec", "ports", 0, "targetPort", to="vllm"),
        "Service demo-octavo leads to the door",
    ),
    (drop(RUNNER, "spec", "ingress", 1), "lets Deployment demo-octavo-gateway in at port 50054"),
    (set_in(RUNNER, "spec", "ingress", 0, "ports", 0, "port", to=50054), "lets others than"),
    (drop(RUNNER, "spec", "ingress", 1, "from"), "lets others than"),
    (drop(RUNNER, "spec", "ingress", 0, "ports"), "lets others than"),
    (set_in(RUNNER, "spec", "ingress", 1, "from", 0, "namespaceSelector", to={}), "lets others than"),
    (set_in(RUNNER, "spec", "ingress", 1, "from", 0, "podSelector", to={}), "lets others than"),
    (set_in(RUNNER, "spec", "ingress", 2, "ports", 0, "port", to="vllm"), "lets others than"),
    (set_in(GATEWAY, "spec", "egress", 2, "ports", 0, "port", to=50051), "gateway out to port 50054"),
    (drop(GATEWAY, "spec", "egress", 2), "gateway out to port 50054"),
]


@pytest.mark.parametrize(("change", "sentence"), DOOR)
def test_a_door_that_stands_open_or_is_not_found(change: Break, sentence: str) -> None:
    manifests = broken("gateway with tls and tokens", change)
    faults = [fault for check in CROSS_CHECKS for fault in check(manifests)]
    assert [fault for fault in faults if sentence in fault], faults


@pytest.mark.parametrize(("change", "sentence"), CROSS_FAULTS, ids=[sentence for _, sentence in CROSS_FAULTS])
def test_a_fault_between_objects_is_found(change: Break, sentence: str) -> None:
    manifests = broken("default", change)
    faults = [fault for check in CROSS_CHECKS for fault in check(manifests)]
    assert [fault for fault in faults if sentence in fault], faults


REFERENCES: list[tuple[str, Break, str]] = [
    ("default", set_in("pod", "spec", "serviceAccountName", to="x"), "needs ServiceAccount x"),
    ("default", in_container("envFrom", [{"secretRef": {"name": "x"}}]), "needs Secret x"),
    ("default", in_container("envFrom", [{"configMapRef": {"name": "x"}}]), "needs ConfigMap x"),
    (
        "default",
        set_in("pod", "spec", "volumes", 0, to={"name": "run", "secret": {"secretName": "x"}}),
        "needs Secret x",
    ),
    ("default", set_in("pod", "spec", "imagePullSecrets", to=[{"name": "x"}]), "needs Secret x"),
    (
        "model in a new claim",
        set_in("PersistentVolumeClaim", "metadata", "name", to="x"),
        "PersistentVolumeClaim demo-octavo-model",
    ),
    ("hpa", set_in("HorizontalPodAutoscaler", "spec", "scaleTargetRef", "name", to="x"), "needs Deployment x"),
    ("keda", set_in("ScaledObject", "spec", "scaleTargetRef", "name", to="x"), "needs Deployment x"),
    ("gateway", set_in("RoleBinding", "roleRef", "name", to="x"), "needs Role x"),
    ("gateway", set_in("RoleBinding", "subjects", 0, "name", to="x"), "needs ServiceAccount x"),
]


@pytest.mark.parametrize(("case", "change", "sentence"), REFERENCES, ids=[f"{c}: {s}" for c, _, s in REFERENCES])
def test_a_name_that_nobody_makes_is_found(case: str, change: Break, sentence: str) -> None:
    faults = list(missing_references(broken(case, change), frozenset()))
    assert [fault for fault in faults if sentence in fault], faults


@pytest.mark.parametrize("kubernetes", ["1.29", "1.33", "1.37"])
def test_schemas_find_misspelt_fields_and_wrong_types(kubernetes: str) -> None:
    def change(objects: Objects) -> None:
        objects["pod"]["spec"]["terminationGracePeriodSecs"] = 5
        container(objects)["livenessProbe"]["periodSeconds"] = "10"

    faults = schema_faults(broken("default", change), kubernetes)
    assert [fault for fault in faults if "'terminationGracePeriodSecs' was unexpected" in fault]
    assert [fault for fault in faults if "'10' is not of type 'integer'" in fault]
    assert len(faults) == 2


def test_a_field_that_an_old_version_lacks_is_found() -> None:
    [item] = rendered("model in an image").of_kind("Deployment")
    assert strict_faults(item, "1.33") == []
    assert "'image' was unexpected" in str(strict_faults(item, "1.29"))


CUSTOM: list[tuple[str, Break, str]] = [
    ("PodMonitor", set_in("PodMonitor", "spec", "podMetricsEndpoints", 0, "interval", to="15secs"), "15secs"),
    ("PodMonitor", set_in("PodMonitor", "spec", "podMetricsEndpoint", to=[]), "'podMetricsEndpoint' was unexpected"),
    ("PodMonitor", drop("PodMonitor", "spec", "selector"), "'selector' is a required property"),
    ("ScaledObject", set_in("ScaledObject", "spec", "minReplicas", to=1), "'minReplicas' was unexpected"),
    (
        "ScaledObject",
        drop("ScaledObject", "spec", "triggers", 0, "metadata", "query"),
        "'query' is a required property",
    ),
    ("ScaledObject", set_in("ScaledObject", "spec", "triggers", 0, "metadata", "threshold", to=4), "4 is not of type"),
]


@pytest.mark.parametrize(("kind", "change", "sentence"), CUSTOM, ids=[sentence for *_, sentence in CUSTOM])
def test_custom_resources_are_checked(kind: str, change: Break, sentence: str) -> None:
    [item] = broken("keda", change).of_kind(kind)
    assert [fault for fault in custom_faults(item) if sentence in fault]


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"alert": "A", "expr": "up == 0", "for": "5minutes"}, "5minutes"),
        ({"alert": "A"}, "'expr' is a required property"),
        ({"expr": "up"}, "is not valid under any of the given schemas"),
        ({"record": "a:b", "expr": "up", "for": "5m"}, "is not valid under any of the given schemas"),
        ({"alert": "A", "expr": "up", "severity": "page"}, "'severity' was unexpected"),
    ],
)
def test_rules_are_checked(rule: Json, sentence: str) -> None:
    item = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "r"},
        "spec": {"groups": [{"name": "g", "rules": [rule]}]},
    }
    assert [fault for fault in custom_faults(item) if sentence in fault], custom_faults(item)
    item["spec"] = {"groups": [{"name": "g", "rules": [{"alert": "A", "expr": "up == 0", "for": "1h30m"}]}]}
    assert custom_faults(item) == []
