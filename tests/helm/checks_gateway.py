"""The gateway's door of the rendered chart: does the gateway find it, and is nobody else let to it?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from tests.helm.checks_network import matches
from tests.helm.manifests import Manifests, Pod
from tests.helm.program import command_line, options

Json = dict[str, Any]


def gateways(manifests: Manifests) -> list[Pod]:
    return [pod for pod in manifests.pods if command_line(pod.containers[-1])[0] == "smg"]


def door_of(pod: Pod) -> int | None:
    """The port at which a pod asks nobody for a token."""
    address = options(command_line(pod.container("model-runner"))).get("vllm-address")
    return int(address.rpartition(":")[2]) if address else None


def discovery_faults(manifests: Manifests) -> Iterator[str]:
    """A gateway looks for the pods that are there, at their door; and there is no door without a gateway."""
    found = gateways(manifests)
    for pod in manifests.octavo_pods:
        if door_of(pod) and not found:
            yield f"{pod.name} has a door at port {door_of(pod)}, and there is no gateway."
    for gateway in found:
        words = command_line(gateway.containers[-1])
        port = options(words)["service-discovery-port"]
        pairs = takewhile(lambda word: not word.startswith("--"), words[words.index("--selector") + 1 :])
        selector = {"matchLabels": dict(pair.split("=", 1) for pair in pairs)}
        selected = [pod for pod in manifests.pods if matches(selector, pod.labels)]
        if selected != manifests.octavo_pods:
            yield f"{gateway.name} looks for {[pod.name for pod in selected]}."
        for pod in manifests.octavo_pods:
            if port != str(door_of(pod)):
                yield f"{gateway.name} looks at port {port}, and the door of {pod.name} is at {door_of(pod)}."


def door_faults(manifests: Manifests) -> Iterator[str]:
    """Network policies let the gateway to the door and nobody else, and no Service leads to it."""
    for pod in manifests.octavo_pods:
        port = door_of(pod)
        if port is None:
            continue
        for service in manifests.of_kind("Service"):
            targets = [each.get("targetPort", each["port"]) for each in service["spec"]["ports"]]
            if matches({"matchLabels": service["spec"]["selector"]}, pod.labels) and _names(pod, port) & set(targets):
                yield f"Service {service['metadata']['name']} leads to the door of {pod.name}."
        for gateway in gateways(manifests):
            yield from _way_faults(manifests, gateway, pod, port)


def _way_faults(manifests: Manifests, gateway: Pod, pod: Pod, port: int) -> Iterator[str]:
    others = [each.labels for each in manifests.pods if each.labels != gateway.labels]
    incoming = _rules(manifests, pod, "ingress")
    if incoming is not None:
        peers = _peers(incoming, "from", _names(pod, port))
        if not any(_is_let(peer, gateway.labels) for peer in peers):
            yield f"No NetworkPolicy lets {gateway.name} in at port {port} of {pod.name}."
        # Some pod of whom we know nothing, in this namespace or another.
        if any(_is_let(peer, labels) for peer in peers for labels in (*others, {})) or any(
            set(peer) != {"podSelector"} for peer in peers
        ):
            yield f"A NetworkPolicy lets others than {gateway.name} to port {port} of {pod.name}."
    outgoing = _rules(manifests, gateway, "egress")
    if outgoing is not None:
        peers = _peers(outgoing, "to", _names(pod, port))
        if not any(_is_let(peer, pod.labels) for peer in peers):
            yield f"No NetworkPolicy lets {gateway.name} out to port {port} of {pod.name}."


def _names(pod: Pod, port: int) -> set[Any]:
    return {port, *(name for name, number in pod.ports.items() if number == port)}


def _rules(manifests: Manifests, pod: Pod, direction: str) -> list[Json] | None:
    """The rules of a direction that hold for a pod; None when no policy closes it."""
    specs = [each["spec"] for each in manifests.of_kind("NetworkPolicy")]
    specs = [each for each in specs if matches(each["podSelector"], pod.labels)]
    closing = [each for each in specs if direction.capitalize() in each["policyTypes"]]
    return [rule for spec in closing for rule in spec.get(direction) or []] if closing else None


def _peers(rules: list[Json], side: str, names: set[Any]) -> list[Json]:
    """Who a port is open for; a rule without ports is for all of them, one without peers for everybody."""
    fitting = [each for each in rules if not each.get("ports") or names & {port["port"] for port in each["ports"]}]
    return [peer for each in fitting for peer in each.get(side) or [{"namespaceSelector": {}}]]


def _is_let(peer: Json, labels: dict[str, str]) -> bool:
    """Whether a peer is a pod of the release's namespace that has these labels."""
    return "ipBlock" not in peer and matches(peer.get("podSelector", {}), labels)


GATEWAY_CHECKS = (discovery_faults, door_faults)
