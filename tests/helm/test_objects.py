"""What is around the chart's pods: TLS and tokens, the network, monitoring, scaling, the gateway, the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart_values import arguments, nested, server, values
from tests.helm.manifests import NAMESPACE, Json, render
from tests.helm.tools import CHART

PROMETHEUS = ("monitoring.coreos.com/v1/PodMonitor", "monitoring.coreos.com/v1/PrometheusRule")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("helm")


def test_tls_takes_the_keys_of_cert_manager(home: Path) -> None:
    given = values(tls__secretName="cert", tls__clientAuth=True, tls__clientSecretName="client")
    manifests = render(home, given)
    args = arguments(server(manifests))
    assert [arg for arg in args if arg.startswith("--tls")] == [
        *("--tls-cert=/etc/octavo/tls/tls.crt", "--tls-key=/etc/octavo/tls/tls.key"),
        "--tls-client-ca=/etc/octavo/tls/ca.crt",
    ]
    (test,) = [pod for pod in manifests.pods if pod.is_test]
    assert {"--tls-ca=/etc/octavo/tls/ca.crt", "--tls-cert=/etc/octavo/tls/tls.crt"} <= set(test.containers[0]["args"])
    assert [each["secret"]["secretName"] for each in test.spec["volumes"] if "secret" in each] == ["client"]


def test_names_that_look_like_numbers_stay_names(home: Path) -> None:
    given = values(tls__secretName="77", auth__tokensSecret="0x10", image__pullSecrets=["123"], nameOverride="12")
    pod = server(render(home, given | {"priorityClassName": "5", "serviceAccount": {"name": "9"}}))
    assert {each["secret"]["secretName"] for each in pod.spec["volumes"] if "secret" in each} == {"77", "0x10"}
    assert pod.spec["imagePullSecrets"] == [{"name": "123"}]
    assert (pod.spec["priorityClassName"], pod.spec["serviceAccountName"]) == ("5", "9")
    assert pod.labels["app.kubernetes.io/name"] == "12"


def test_the_test_pod_never_gets_the_servers_key(home: Path) -> None:
    (test,) = [pod for pod in render(home, nested("tls.secretName", "cert")).pods if pod.is_test]
    (secret,) = [each["secret"] for each in test.spec["volumes"] if "secret" in each]
    assert secret["items"] == [{"key": "ca.crt", "path": "ca.crt"}]


def test_there_is_no_test_without_what_it_would_need(home: Path) -> None:
    mutual = values(tls__secretName="cert", tls__clientAuth=True)
    tokens = values(tls__secretName="cert", auth__tokensSecret="tokens")
    for given in (mutual, tokens, nested("test.enabled", False)):
        assert not [pod for pod in render(home, given).pods if pod.is_test]


def test_tokens_come_from_a_secret_and_the_test_has_one(home: Path) -> None:
    given = values(tls__secretName="cert", auth__tokensSecret="tokens", auth__test={"tokenSecret": "probe"})
    manifests = render(home, given)
    assert "--auth-tokens=/etc/octavo/auth/tokens.yaml" in arguments(server(manifests))
    (test,) = [pod for pod in manifests.pods if pod.is_test]
    token = {"secretKeyRef": {"name": "probe", "key": "token"}}
    assert {"name": "OCTAVO_AUTH_TOKEN", "valueFrom": token} in test.containers[0]["env"]


def test_the_test_calls_the_service(home: Path) -> None:
    manifests = render(home, nested("service.port", 80))
    (test,) = [pod for pod in manifests.pods if pod.is_test]
    service = next(each for each in manifests.of_kind("Service") if each["spec"].get("clusterIP") != "None")
    address = f"{service['metadata']['name']}.{NAMESPACE}.svc:80"
    assert test.containers[0]["args"][0] == "generate"
    assert {f"--runner-address={address}", "--max-tokens=1"} <= set(test.containers[0]["args"])


def ingress(policy: Json, port: int) -> list[Json]:
    (rule,) = [rule for rule in policy["spec"]["ingress"] if port in [each["port"] for each in rule["ports"]]]
    return rule["from"]


def test_the_network_is_closed_but_for_clients_and_scrapes(home: Path) -> None:
    (policy,) = render(home).of_kind("NetworkPolicy")
    assert {"podSelector": {}} in ingress(policy, 50051)
    assert ingress(policy, 9401) == ingress(policy, 9402) == [{"namespaceSelector": {}}]
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [53, 53]
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]


def test_the_network_lets_in_who_is_named_and_the_test_and_a_download_out(home: Path) -> None:
    team = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team"}}}
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    given = values(networkPolicy={"clients": [team], "monitoring": [scraper]}, model__source="download")
    given["model"]["download"] = {"repository": "org/name"}
    manifests = render(home, given)
    (policy,) = manifests.of_kind("NetworkPolicy")
    (test,) = [pod for pod in manifests.pods if pod.is_test]
    (tested, named) = ingress(policy, 50051)
    assert named == team
    assert tested["podSelector"]["matchLabels"].items() <= test.labels.items()
    assert ingress(policy, 9402) == [scraper]
    assert [port["port"] for rule in policy["spec"]["egress"] for port in rule["ports"]] == [53, 53, 443]


# --- Monitoring


@pytest.mark.parametrize(
    ("enabled", "apis", "there"),
    [
        ("auto", (), False),
        ("auto", PROMETHEUS, True),
        ("auto", ("monitoring.coreos.com/v1",), True),
        (True, (), True),
        (False, PROMETHEUS, False),
    ],
)
def test_monitoring_is_on_when_its_kinds_are_there(home: Path, enabled: Any, apis: Any, there: bool) -> None:
    parts = ("podMonitor", "prometheusRule", "dashboards")
    given = {"monitoring": {part: {"enabled": enabled} for part in parts}}
    manifests = render(home, given, apis=apis)
    assert bool(manifests.of_kind("PodMonitor")) is there
    assert bool(manifests.of_kind("PrometheusRule")) is there
    assert len(manifests.of_kind("ConfigMap")) == (len(list(CHART.glob("dashboards/*.json"))) if there else 0)


def test_every_alert_leads_to_its_runbook(home: Path) -> None:
    monitoring = nested("monitoring.prometheusRule", {"enabled": True, "runbookUrl": "https://runbooks.example/octavo"})
    (rule,) = render(home, monitoring).of_kind("PrometheusRule")
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"] if "alert" in each]
    assert len(alerts) == 14
    for alert in alerts:
        anchor = f"https://runbooks.example/octavo#{alert['alert'].lower()}"
        assert alert["annotations"]["runbook_url"] == anchor


def test_a_dashboard_is_a_file_that_grafanas_sidecar_finds(home: Path) -> None:
    labels = {"labels": {"grafana": "mine"}, "annotations": {"folder": "LLM"}}
    maps = render(home, nested("monitoring.dashboards", labels | {"enabled": True})).of_kind("ConfigMap")
    assert {name for each in maps for name in each["data"]} == {path.name for path in CHART.glob("dashboards/*.json")}
    for each in maps:
        assert each["metadata"]["labels"]["grafana"] == "mine"
        assert each["metadata"]["annotations"] == {"folder": "LLM", "grafana_folder": "Octavo"}
        ((name, text),) = each["data"].items()
        assert json.loads(text) == json.loads((CHART / "dashboards" / name).read_text(encoding="utf-8"))


def test_both_services_are_scraped_under_one_job(home: Path) -> None:
    (monitor,) = render(home, apis=PROMETHEUS).of_kind("PodMonitor")
    pod = server(render(home))
    assert [pod.ports[each["port"]] for each in monitor["spec"]["podMetricsEndpoints"]] == [9402, 9401]
    assert pod.labels[monitor["spec"]["jobLabel"]] == "octavo"


# --- Scaling


def test_an_autoscaler_owns_the_number_of_pods(home: Path) -> None:
    given = nested("autoscaling", {"enabled": True, "maxReplicas": 6, "waitingRequests": 3, "heldRatio": 0.9})
    manifests = render(home, given)
    (deployment,) = manifests.of_kind("Deployment")
    assert "replicas" not in deployment["spec"]
    (scaler,) = manifests.of_kind("HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    waiting, held = (each["pods"] for each in scaler["spec"]["metrics"])
    assert waiting["metric"]["name"] == "octavo_runner_requests"
    assert waiting["metric"]["selector"] == {"matchLabels": {"state": "waiting"}}
    assert (waiting["target"]["averageValue"], held["target"]["averageValue"]) == ("3", "0.9")


def test_keda_asks_prometheus_for_the_pods_of_the_release(home: Path) -> None:
    keda = {"serverAddress": "http://prometheus.monitoring:9090"}
    given = nested("autoscaling", {"enabled": True, "kind": "keda", "minReplicas": 0, "keda": keda})
    manifests = render(home, given)
    assert not manifests.of_kind("HorizontalPodAutoscaler")
    (scaled,) = manifests.of_kind("ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"] == {
        "serverAddress": "http://prometheus.monitoring:9090",
        "query": 'sum(octavo_runner_requests{namespace="serving",pod=~"demo-octavo-[^-]+-[^-]+",state="waiting"})',
        "threshold": "4",
    }
    assert scaled["spec"]["minReplicaCount"] == 0


# --- The gateway


def test_without_a_gateway_nobody_is_told_what_others_have_asked(home: Path) -> None:
    """VllmEngine tells the tokens of cached prompts, and the image can serve it."""
    default = arguments(server(render(home)))
    assert "--no-vllm-grpc" in default
    assert not [arg for arg in default if arg.startswith(("--vllm-address", "--vllm-tenant"))]
    assert "vllm" not in server(render(home)).ports
    asked = arguments(server(render(home, nested("runner.settings.vllmGrpc", True))))
    assert "--vllm-grpc" in asked
    assert "--no-vllm-grpc" not in asked


def test_the_gateway_finds_the_pods_of_the_release_and_may(home: Path) -> None:
    manifests = render(home, nested("gateway.enabled", True), apis=PROMETHEUS)
    (gateway,) = [pod for pod in manifests.pods if pod.maker["metadata"]["name"] == "demo-octavo-gateway"]
    args = gateway.containers[0]["args"]
    first = args.index("--selector") + 1
    selector = dict(arg.split("=") for arg in args[first : first + 3])
    assert selector.items() <= server(manifests).labels.items()
    assert not selector.items() <= gateway.labels.items()
    assert {"--service-discovery", f"--service-discovery-namespace={NAMESPACE}"} <= set(args)
    assert "--service-discovery-port=50054" in args
    assert {"--vllm-address=0.0.0.0:50054", "--no-vllm-grpc"} <= set(arguments(server(manifests)))
    assert server(manifests).ports["vllm"] == 50054
    (role,) = manifests.of_kind("Role")
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    (binding,) = manifests.of_kind("RoleBinding")
    assert [each["name"] for each in binding["subjects"]] == [gateway.spec["serviceAccountName"]]
    assert gateway.spec["automountServiceAccountToken"] is True
    assert server(manifests).spec["automountServiceAccountToken"] is False


def test_nobody_but_the_gateway_is_let_to_the_door_and_clients_call_as_ever(home: Path) -> None:
    team = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team"}}}
    for given, clients in (({}, {"podSelector": {}}), ({"networkPolicy": {"clients": [team]}}, team)):
        manifests = render(home, nested("gateway.enabled", True) | given)
        policies = {each["metadata"]["name"]: each for each in manifests.of_kind("NetworkPolicy")}
        (gateway,) = [pod for pod in manifests.pods if pod.maker["metadata"]["name"] == "demo-octavo-gateway"]
        (door,) = ingress(policies["demo-octavo"], 50054)
        labels = door["podSelector"]["matchLabels"]
        assert labels == {
            "app.kubernetes.io/name": "octavo",
            "app.kubernetes.io/instance": "demo",
            "app.kubernetes.io/component": "gateway",
        }
        assert labels.items() <= gateway.labels.items()
        assert clients in ingress(policies["demo-octavo"], 50051)
        sent = [port["port"] for rule in policies["demo-octavo-gateway"]["spec"]["egress"] for port in rule["ports"]]
        assert sent == [53, 53, 443, 6443, 50054]
        for service in manifests.of_kind("Service"):
            assert not {50054, "vllm"} & {port["targetPort"] for port in service["spec"]["ports"]}


def test_with_tls_and_tokens_the_gateway_is_one_tenant(home: Path) -> None:
    given = values(tls__secretName="cert", auth__tokensSecret="tokens", gateway={"enabled": True, "tenant": "web"})
    args = arguments(server(render(home, given)))
    assert {"--vllm-tenant=web", "--vllm-address=0.0.0.0:50054", "--no-vllm-grpc"} <= set(args)
    assert {"--tls-cert=/etc/octavo/tls/tls.crt", "--auth-tokens=/etc/octavo/auth/tokens.yaml"} <= set(args)


def test_the_key_of_the_gateway_comes_from_a_secret(home: Path) -> None:
    given = values(gateway__enabled=True, gateway__apiKeySecret="keys")
    (gateway,) = [pod for pod in render(home, given).pods if pod.containers[0]["name"] == "smg"]
    container = gateway.containers[0]
    assert "--api-key=$(SMG_API_KEY)" in container["args"]
    key = {"secretKeyRef": {"name": "keys", "key": "api-key"}}
    assert {"name": "SMG_API_KEY", "valueFrom": key} in container["env"]
