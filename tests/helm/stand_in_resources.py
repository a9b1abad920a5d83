"""What the stand-in API tells of itself: its version, its kinds of objects, and that it validates fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, and where it is found."""

    group_version: str
    plural: str
    kind: str
    namespaced: bool = True
    short_name: str = ""

    @property
    def prefix(self) -> str:
        """The path of its group: api/v1 or apis/GROUP/VERSION."""
        return f"api/{self.group_version}" if "/" not in self.group_version else f"apis/{self.group_version}"

    @property
    def custom(self) -> bool:
        """True for what comes from a CRD, whose objects nobody here can validate."""
        return self in MONITORING or self in KEDA


BUILT_IN = (
    Resource("v1", "namespaces", "Namespace", namespaced=False),
    Resource("v1", "pods", "Pod"),
    Resource("v1", "services", "Service", short_name="svc"),
    Resource("v1", "secrets", "Secret"),
    Resource("v1", "configmaps", "ConfigMap", short_name="cm"),
    Resource("v1", "serviceaccounts", "ServiceAccount", short_name="sa"),
    Resource("v1", "persistentvolumeclaims", "PersistentVolumeClaim", short_name="pvc"),
    Resource("v1", "events", "Event"),
    Resource("apps/v1", "deployments", "Deployment", short_name="deploy"),
    Resource("apps/v1", "replicasets", "ReplicaSet", short_name="rs"),
    Resource("apps/v1", "statefulsets", "StatefulSet"),
    Resource("batch/v1", "jobs", "Job"),
    Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", short_name="pdb"),
    Resource("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", short_name="hpa"),
    Resource("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", short_name="netpol"),
    Resource("rbac.authorization.k8s.io/v1", "roles", "Role"),
    Resource("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding"),
)
MONITORING = (
    Resource("monitoring.coreos.com/v1", "podmonitors", "PodMonitor"),
    Resource("monitoring.coreos.com/v1", "servicemonitors", "ServiceMonitor"),
    Resource("monitoring.coreos.com/v1", "prometheusrules", "PrometheusRule"),
)
KEDA = (
    Resource("keda.sh/v1alpha1", "scaledobjects", "ScaledObject"),
    Resource("keda.sh/v1alpha1", "triggerauthentications", "TriggerAuthentication"),
)
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


def version(kubernetes: str) -> dict[str, Any]:
    major, minor = kubernetes.split(".")
    return {"major": major, "minor": minor, "gitVersion": f"v{kubernetes}.0"}


def group_list(resources: Sequence[Resource]) -> dict[str, Any]:
    """The answer to GET /apis."""
    names = sorted({each.group_version for each in resources if "/" in each.group_version})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(name) for name in names]}


def _group(group_version: str) -> dict[str, Any]:
    name, version_name = group_version.split("/")
    entry = {"groupVersion": group_version, "version": version_name}
    return {"name": name, "versions": [entry], "preferredVersion": entry}


def resource_list(group_version: str, resources: Sequence[Resource]) -> dict[str, Any]:
    """The answer to GET /api/v1 or /apis/GROUP/VERSION."""
    listed = [_listed(each) for each in resources if each.group_version == group_version]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": listed}


def _listed(resource: Resource) -> dict[str, Any]:
    return {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "shortNames": [resource.short_name] if resource.short_name else [],
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": VERBS,
    }


def openapi_index(resources: Sequence[Resource]) -> dict[str, Any]:
    """The answer to GET /openapi/v3."""
    prefixes = sorted({each.prefix for each in resources})
    return {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}?hash=1"} for prefix in prefixes}}


def openapi_of(prefix: str, resources: Sequence[Resource]) -> dict[str, Any]:
    """No schemas, but the word that PATCH knows fieldValidation: clients leave validation to a server that does."""
    paths = {_path(each): {"patch": _patch(each)} for each in resources if each.prefix == prefix}
    info = {"title": "stand-in", "version": "1"}
    return {"openapi": "3.0.0", "info": info, "components": {"schemas": {}}, "paths": paths}


def _path(resource: Resource) -> str:
    middle = "namespaces/{namespace}/" if resource.namespaced else ""
    return f"/{resource.prefix}/{middle}{resource.plural}/{{name}}"


def _patch(resource: Resource) -> dict[str, Any]:
    group, _, version_name = resource.group_version.rpartition("/")
    return {
        "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": {"group": group, "version": version_name, "kind": resource.kind},
    }
