"""Values for the chart, written shortly, and the parts of its pods that tests look at."""

from __future__ import annotations

from typing import Any

from tests.helm.manifests import Json, Manifests, Pod


def nested(path: str, value: Any) -> Json:
    """`a.b` and 1 are {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def values(**pairs: Any) -> Json:
    """Values from names with two underscores for a dot; for a few that belong together."""
    merged: Json = {}
    for name, value in pairs.items():
        *folders, last = name.split("__")
        place = merged
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return merged


def server(manifests: Manifests) -> Pod:
    (pod,) = manifests.octavo_pods
    return pod


def arguments(pod: Pod, container: str = "model-runner") -> list[str]:
    return pod.container(container)["args"]
