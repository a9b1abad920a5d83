"""Ports, probes and selectors of the rendered chart: does what refers to a pod meet it, and only it?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.helm.manifests import Manifests, Pod
from tests.helm.program import command_line, options

Json = dict[str, Any]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
SCRAPED = ("kv-metrics", "runner-metrics")


def matches(selector: Json | None, labels: dict[str, str]) -> bool:
    """Whether a label selector selects these labels. None selects nothing, {} everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or []
    return wanted.items() <= labels.items() and all(_expression_holds(each, labels) for each in expressions)


def _expression_holds(expression: Json, labels: dict[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case _:
            return value is None


def selectors(manifests: Manifests) -> Iterator[tuple[str, Json]]:
    """What selects pods, with its selector."""
    for item in manifests.objects:
        name = f"{item['kind']} {item['metadata']['name']}"
        spec = item.get("spec") or {}
        match item["kind"]:
            case "Service" if spec.get("selector"):
                yield name, {"matchLabels": spec["selector"]}
            case "PodDisruptionBudget" | "PodMonitor" | "Deployment":
                yield name, spec["selector"]
            case "NetworkPolicy":
                yield name, spec["podSelector"]


def selected_faults(manifests: Manifests) -> Iterator[str]:
    """Each selector finds the pods of one object, and no others."""
    for name, selector in selectors(manifests):
        found = {pod.name for pod in manifests.pods if matches(selector, pod.labels)}
        if not found:
            yield f"{name} selects no pod."
        if len(found) > 1:
            yield f"{name} selects the pods of {' and '.join(sorted(found))}."


def deployment_faults(manifests: Manifests) -> Iterator[str]:
    """A Deployment selects its own pods, and spreads those; its selector has nothing that an upgrade changes."""
    for item in manifests.of_kind("Deployment"):
        name = item["metadata"]["name"]
        labels = item["spec"]["template"]["metadata"]["labels"]
        if not matches(item["spec"]["selector"], labels):
            yield f"Deployment {name} does not select its own pods."
        for changing in {"helm.sh/chart", "app.kubernetes.io/version"} & set(item["spec"]["selector"]["matchLabels"]):
            yield f"Deployment {name} selects by {changing}, which an upgrade changes."
        for each in item["spec"]["template"]["spec"].get("topologySpreadConstraints") or []:
            if not matches(each.get("labelSelector"), labels):
                yield f"Deployment {name} spreads pods over {each['topologyKey']} that are not its own."


def service_faults(manifests: Manifests) -> Iterator[str]:
    """Each port of a Service leads to a container port."""
    for service in manifests.of_kind("Service"):
        spec = service["spec"]
        for pod in manifests.pods:
            if matches({"matchLabels": spec.get("selector") or {"": ""}}, pod.labels):
                for port in spec["ports"]:
                    yield from _port_fault(
                        pod, port.get("targetPort", port["port"]), f"Service {service['metadata']['name']}"
                    )


def monitor_faults(manifests: Manifests) -> Iterator[str]:
    """Each endpoint of a PodMonitor is a container port by name, and both metrics of the pods are scraped."""
    for monitor in manifests.of_kind("PodMonitor"):
        name = f"PodMonitor {monitor['metadata']['name']}"
        ports = [each.get("port") for each in monitor["spec"]["podMetricsEndpoints"]]
        for pod in manifests.pods:
            if matches(monitor["spec"]["selector"], pod.labels):
                for port in ports:
                    yield from _port_fault(pod, port, name)
                for missing in set(SCRAPED) & set(pod.ports) - set(ports):
                    yield f"{name} does not scrape {missing}."


def _port_fault(pod: Pod, port: Any, who: str) -> Iterator[str]:
    known = pod.ports if isinstance(port, str) else pod.ports.values()
    if port not in known:
        yield f"{who} leads to port {port}, which {pod.name} does not have."


def probe_faults(manifests: Manifests) -> Iterator[str]:
    """Each probe asks a numeric port of its own container, on which something listens in plaintext on all addresses."""
    for pod in manifests.pods:
        for container in pod.containers:
            for probe in PROBES:
                if probe in container:
                    yield from (f"{pod.name}: {fault}" for fault in _probe_faults(container, probe))


def _probe_faults(container: Json, probe: str) -> Iterator[str]:
    ports = {each["containerPort"] for each in container.get("ports") or []}
    names = {each["name"]: each["containerPort"] for each in container.get("ports") or []}
    handler = next(
        (container[probe][kind] for kind in ("grpc", "httpGet", "tcpSocket") if kind in container[probe]), None
    )
    if handler is None:
        return
    port = names.get(handler["port"], handler["port"])
    if "grpc" in container[probe] and not isinstance(handler["port"], int):
        yield f"{probe} of {container['name']} names its port: a gRPC probe needs a number."
    elif port not in ports:
        yield f"{probe} of {container['name']} asks port {port}, which is no port of the container."
    elif listening(container) and port not in listening(container):
        yield f"{probe} of {container['name']} asks port {port}, on which nothing listens."


def listening(container: Json) -> set[int]:
    """The TCP ports that a container listens on, on all addresses, by its arguments."""
    words = command_line(container)
    given = options(words)
    if words[0] == "smg":
        return {int(given[name]) for name in ("port", "health-check-port", "prometheus-port") if name in given}
    addresses = (value for name, value in given.items() if name.endswith("-address"))
    return {int(found[1]) for address in addresses if (found := re.fullmatch(r"0\.0\.0\.0:(\d+)", address))}


def container_port_faults(manifests: Manifests) -> Iterator[str]:
    """Each container listens on exactly the ports that it declares; names and numbers are unique."""
    for pod in manifests.pods:
        declared = [port for each in pod.containers for port in each.get("ports") or []]
        for key in ("name", "containerPort"):
            values = [port[key] for port in declared]
            for twice in {value for value in values if values.count(value) > 1}:
                yield f"{pod.name} has port {twice} twice."
        for port in declared:
            if len(port["name"]) > 15:
                yield f"{pod.name}: the name of port {port['name']} has more than 15 characters."
        for container in pod.containers:
            ports = {port["containerPort"] for port in container.get("ports") or []}
            for port in ports ^ listening(container):
                yield f"{pod.name}: {container['name']} declares or listens on port {port}, but not both."


def network_policy_faults(manifests: Manifests) -> Iterator[str]:
    """Where a pod has network policies, gRPC and every metrics port are let in, and DNS is let out."""
    for pod in manifests.pods:
        policies = [
            each for each in manifests.of_kind("NetworkPolicy") if matches(each["spec"]["podSelector"], pod.labels)
        ]
        admitting = [each["spec"] for each in policies if "Ingress" in each["spec"]["policyTypes"]]
        sending = [each["spec"] for each in policies if "Egress" in each["spec"]["policyTypes"]]
        if admitting:
            admitted = _ports_of(rule for spec in admitting for rule in spec.get("ingress") or [])
            for name, port in pod.ports.items():
                # Probes come from the node, which network policies let through.
                if "health" not in name and "*" not in admitted and not {name, port} & admitted:
                    yield f"No NetworkPolicy lets anybody to port {name} of {pod.name}."
        if sending:
            sent = _ports_of(rule for spec in sending for rule in spec.get("egress") or [])
            if not {53, "*"} & sent:
                yield f"No NetworkPolicy lets {pod.name} ask for names (port 53)."
    for policy in manifests.of_kind("NetworkPolicy"):
        for pod in manifests.pods:
            if matches(policy["spec"]["podSelector"], pod.labels):
                for port in _ports_of(policy["spec"].get("ingress") or []) - {"*"}:
                    yield from _port_fault(pod, port, f"NetworkPolicy {policy['metadata']['name']}")


def _ports_of(rules: Any) -> set[Any]:
    """The ports of rules; '*' when a rule has none, which is all."""
    return {port["port"] for rule in rules for port in rule.get("ports") or [{"port": "*"}]}


NETWORK_CHECKS = (
    selected_faults,
    deployment_faults,
    service_faults,
    monitor_faults,
    probe_faults,
    container_port_faults,
    network_policy_faults,
)
