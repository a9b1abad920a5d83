"""The chart's values that the tests render, each with what a user must have made beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.helm.manifests import Manifests, render
from tests.helm.tools import CHART, KUBERNETES_VERSIONS

Json = dict[str, Any]
APIS = (
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "keda.sh/v1alpha1/ScaledObject",
)


@dataclass(frozen=True)
class Case:
    """Values, and the objects by (kind, name) that they refer to."""

    values: Json
    files: tuple[str, ...] = ()
    outside: frozenset[tuple[str, str]] = frozenset()
    kubernetes: tuple[str, ...] = KUBERNETES_VERSIONS
    has: str = ""
    """Kinds that there must be, besides the Deployment."""
    lacks: str = ""
    """Kinds that there must not be."""


def given(**names: str) -> frozenset[tuple[str, str]]:
    """given(Secret='a b') for two Secrets."""
    return frozenset((kind, name) for kind, listed in names.items() for name in listed.split())


MINIMAL: Json = {
    "networkPolicy": {"enabled": False},
    "podDisruptionBudget": {"enabled": False},
    "serviceAccount": {"create": False},
    "service": {"headless": False},
    "topologySpreadConstraints": [],
    "test": {"enabled": False},
    "monitoring": {kind: {"enabled": False} for kind in ("podMonitor", "prometheusRule", "dashboards")},
}
TLS_AND_AUTH: Json = {
    "tls": {"secretName": "server-tls", "clientAuth": True, "clientSecretName": "client-tls"},
    "auth": {"tokensSecret": "tenants", "test": {"tokenSecret": "test-token"}},
}
ALL_ON: Json = TLS_AND_AUTH | {
    "fullnameOverride": "all",
    "commonLabels": {"team": "serving"},
    "replicaCount": 3,
    "image": {
        "registry": "registry.example",
        "pullSecrets": ["pull"],
        "runner": {"digest": f"sha256:{'a' * 64}"},
        "kvManager": {"tag": "0.1.0-rc.1", "pullPolicy": "Always"},
    },
    "model": {
        "source": "download",
        "name": "tiny",
        "path": "tiny.gguf",
        "pvc": {"create": True, "accessModes": ["ReadWriteMany"], "storageClassName": "nfs", "annotations": {"a": "b"}},
        "download": {
            "repository": "example/tiny",
            "revision": "0123abcd",
            "token": {"secretName": "hub"},
            "endpoint": "https://hub.example",
            "env": {"HTTPS_PROXY": "http://proxy.example:3128"},
        },
    },
    "runner": {
        "settings": {
            "kvCacheMemory": "2GiB",
            "blockSize": 32,
            "maxSequences": 32,
            "deterministic": True,
            "maxConnectionAgeSeconds": 600,
        },
        "args": ["--log-level=debug"],
        "env": {"OMP_NUM_THREADS": "4", "NODE": {"valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}},
        "envFrom": [{"secretRef": {"name": "more"}}],
        "shm": {"enabled": True},
        "volumes": [{"name": "extra", "configMap": {"name": "extra"}}],
        "volumeMounts": [{"name": "extra", "mountPath": "/extra", "readOnly": True}],
    },
    "kvManager": {"settings": {"sessionSilenceSeconds": 5}, "env": {"TZ": "UTC"}},
    "termination": {"lameDuckSeconds": 3, "drainSeconds": 30, "gracePeriodSeconds": 100},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "other",
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "extraEgress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}],
    },
    "monitoring": {
        "podMonitor": {"enabled": True, "interval": "15s", "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "runbookUrl": "https://docs.example/operations"},
        "dashboards": {"enabled": True},
    },
}
KEDA: Json = {"autoscaling": {"enabled": True, "kind": "keda", "keda": {"serverAddress": "http://prometheus:9090"}}}
SECRETS = given(Secret="server-tls client-tls tenants test-token")

CASES: dict[str, Case] = {
    "default": Case({}, has="PodMonitor NetworkPolicy PodDisruptionBudget"),
    "minimal": Case(
        MINIMAL,
        lacks="PodMonitor NetworkPolicy PodDisruptionBudget Pod ServiceAccount ConfigMap",
    ),
    "all on": Case(
        ALL_ON,
        outside=SECRETS | given(Secret="pull hub more", ConfigMap="extra"),
        has="PersistentVolumeClaim",
    ),
    "cpu": Case({}, ("values-cpu.yaml",)),
    "gpu": Case({}, ("values-gpu.yaml",)),
    "tls and tokens": Case(TLS_AND_AUTH, outside=SECRETS),
    "tls": Case({"tls": {"secretName": "server-tls"}}, outside=SECRETS),
    "tokens in a mesh": Case({"auth": {"tokensSecret": "tenants", "allowPlaintext": True}}, outside=SECRETS),
    "model by path": Case({"model": {"source": "path", "path": "/models/a.gguf"}}),
    "model in a claim": Case(
        {"model": {"source": "pvc", "path": "llama", "pvc": {"existingClaim": "weights"}}},
        outside=given(PersistentVolumeClaim="weights"),
    ),
    "model in a new claim": Case({"model": {"source": "pvc", "pvc": {"create": True}}}, has="PersistentVolumeClaim"),
    "model downloaded": Case({"model": {"source": "download", "download": {"repository": "example/tiny"}}}),
    "model in an image": Case(
        {"model": {"source": "image", "image": {"reference": "registry.example/weights:1"}}},
        kubernetes=("1.33", "1.37"),
    ),
    "gateway": Case({"gateway": {"enabled": True}, "replicaCount": 2}, has="Role RoleBinding"),
    "gateway with a key": Case(
        {"gateway": {"enabled": True, "apiKeySecret": "gateway-key"}}, outside=given(Secret="gateway-key")
    ),
    "gateway with tls and tokens": Case(
        TLS_AND_AUTH | {"gateway": {"enabled": True, "apiKeySecret": "gateway-key", "tenant": "web"}},
        outside=SECRETS | given(Secret="gateway-key"),
        has="Role NetworkPolicy",
    ),
    "gateway without policies": Case(
        MINIMAL | {"gateway": {"enabled": True, "allowOpenDoor": True}}, lacks="NetworkPolicy Pod"
    ),
    "hpa": Case(
        {"autoscaling": {"enabled": True, "heldRatio": 0.8}},
        has="HorizontalPodAutoscaler",
        lacks="ScaledObject",
    ),
    "keda": Case(KEDA, has="ScaledObject", lacks="HorizontalPodAutoscaler"),
}


@cache
def rendered(name: str, kubernetes: str = "1.33") -> Manifests:
    """The objects of a case on a cluster with all custom resources, once for each process."""
    case = CASES[name]
    with TemporaryDirectory() as home:
        files = [CHART / file for file in case.files]
        return render(Path(home), case.values, *files, kubernetes=kubernetes, apis=APIS)


def matrix() -> list[Any]:
    """(case, Kubernetes version) for a test's parameters."""
    return [
        pytest.param(name, kubernetes, id=f"{name}-{kubernetes}")
        for name, case in CASES.items()
        for kubernetes in case.kubernetes
    ]
