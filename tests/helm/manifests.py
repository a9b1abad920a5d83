"""The chart rendered to objects, and the pods that are in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from tests.helm.tools import CHART, HelmVersion, helm

Json = dict[str, Any]
RELEASE = "demo"
YAML_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C, where there is one: thirty times as fast."""
NAMESPACE = "serving"


class RefusedValues(Exception):
    """What helm says when it does not render the chart."""


@dataclass(frozen=True)
class Pod:
    """A pod as some object makes it."""

    maker: Json
    metadata: Json
    spec: Json

    @property
    def name(self) -> str:
        return f"{self.maker['kind']} {self.maker['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return self.metadata.get("labels") or {}

    @property
    def containers(self) -> list[Json]:
        """All containers in the order in which they start, init containers first."""
        return [*(self.spec.get("initContainers") or []), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        """Container ports by name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports") or []}

    @property
    def is_test(self) -> bool:
        return "test" in (self.maker["metadata"].get("annotations") or {}).get("helm.sh/hook", "")

    def container(self, name: str) -> Json:
        return next(each for each in self.containers if each["name"] == name)


@dataclass(frozen=True)
class Manifests:
    """The objects of a release."""

    objects: Sequence[Json]

    def of_kind(self, kind: str) -> list[Json]:
        return [each for each in self.objects if each["kind"] == kind]

    def names_of(self, kind: str) -> set[str]:
        return {each["metadata"]["name"] for each in self.of_kind(kind)}

    @cached_property
    def pods(self) -> list[Pod]:
        """Every pod that an object makes, those of hooks too."""
        return list(_pods(self.objects))

    @property
    def octavo_pods(self) -> list[Pod]:
        """The pods with both services."""
        return [pod for pod in self.pods if "kv-manager" in [each["name"] for each in pod.containers]]


def _pods(objects: Sequence[Json]) -> Iterator[Pod]:
    for item in objects:
        match item["kind"]:
            case "Pod":
                yield Pod(item, item["metadata"], item["spec"])
            case "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet" | "Job":
                template = item["spec"]["template"]
                yield Pod(item, template.get("metadata") or {}, template["spec"])
            case "CronJob":
                template = item["spec"]["jobTemplate"]["spec"]["template"]
                yield Pod(item, template.get("metadata") or {}, template["spec"])


def render(
    home: Path,
    values: Json | None = None,
    *files: Path,
    chart: Path = CHART,
    kubernetes: str = "1.33",
    apis: Sequence[str] = (),
    version: HelmVersion = "4",
) -> Manifests:
    """The chart with values of its own folder's files and `values`, for a cluster with these custom `apis`.

    Raises RefusedValues with helm's words when the chart can't be rendered.
    """
    given = home / "values.yaml"
    given.write_text(yaml.safe_dump(values or {}))
    options = [part for file in (*files, given) for part in ("--values", str(file))]
    options += [part for api in apis for part in ("--api-versions", api)]
    where = ("--namespace", NAMESPACE, "--kube-version", f"{kubernetes}.0")
    done = helm("template", RELEASE, chart, *where, *options, version=version, home=home)
    if done.returncode:
        raise RefusedValues(done.stderr.strip())
    return Manifests([each for each in yaml.load_all(done.stdout, Loader=YAML_LOADER) if each])
