"""A rendered Deployment as a pod that podman can play: no cluster, the same images, users and file systems.

What is lost: podman knows neither native sidecars nor probes by gRPC, so that the sidecar becomes a container like the
other, and whoever plays the pod asks for health. The network is the host's, on loopback and on free ports. Limits of
memory and CPU are left out, and so is what only a scheduler reads.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

KEPT_OF_POD = ("securityContext", "terminationGracePeriodSeconds", "volumes")
KEPT_OF_CONTAINER = ("name", "image", "command", "args", "env", "securityContext", "volumeMounts")


def deployment_of(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The one Deployment whose pods have a model runner."""
    [found] = (
        each
        for each in documents
        if each["kind"] == "Deployment"
        and any(box["name"] == "model-runner" for box in each["spec"]["template"]["spec"]["containers"])
    )
    return found


def playable(
    deployment: dict[str, Any], name: str, free_port: Callable[[], int]
) -> tuple[dict[str, Any], dict[int, int]]:
    """The pod to play, and the port on loopback of each port that the chart has given out."""
    spec = copy.deepcopy(deployment["spec"]["template"]["spec"])
    ports: dict[int, int] = {}

    def loopback(said: re.Match[str]) -> str:
        port = int(said[1])
        return f"127.0.0.1:{ports.setdefault(port, free_port())}"

    boxes = [each for each in spec.get("initContainers", []) if each.get("restartPolicy") == "Always"]
    boxes += spec["containers"]
    pod = {key: spec[key] for key in KEPT_OF_POD if key in spec}
    pod["hostNetwork"] = True
    pod["restartPolicy"] = "Never"
    pod["containers"] = []
    for box in boxes:
        kept = {key: box[key] for key in KEPT_OF_CONTAINER if key in box}
        kept["args"] = [re.sub(r"0\.0\.0\.0:(\d+)", loopback, each) for each in kept.get("args", [])]
        kept["imagePullPolicy"] = "Never"
        pod["containers"].append(kept)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": pod}, ports


def pre_stop_of(deployment: dict[str, Any]) -> list[str]:
    """The model runner's preStop command."""
    [runner] = deployment["spec"]["template"]["spec"]["containers"]
    return list(runner["lifecycle"]["preStop"]["exec"]["command"])
