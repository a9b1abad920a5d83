"""Names in the rendered chart: does all that is referred to exist, in the release or by the user's word?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.helm.manifests import NAMESPACE, RELEASE, Manifests, Pod

Json = dict[str, Any]
Reference = tuple[str, str]


def volume_faults(manifests: Manifests) -> Iterator[str]:
    """Each mount has a volume, each volume a mount, and no two mounts of a container are at one place."""
    for pod in manifests.pods:
        volumes = [each["name"] for each in pod.spec.get("volumes") or []]
        mounted = set()
        for container in pod.containers:
            mounts = container.get("volumeMounts") or []
            paths = [each["mountPath"] for each in mounts]
            mounted |= {each["name"] for each in mounts}
            for each in mounts:
                if each["name"] not in volumes:
                    yield f"{pod.name}: {container['name']} mounts {each['name']}, which is no volume."
            for path in sorted({path for path in paths if paths.count(path) > 1}):
                yield f"{pod.name}: {container['name']} mounts two volumes at {path}."
        for name in sorted(set(volumes) - mounted):
            yield f"{pod.name}: nobody mounts the volume {name}."
        for name in sorted({name for name in volumes if volumes.count(name) > 1}):
            yield f"{pod.name}: the volume {name} is there twice."


def references(pod: Pod) -> Iterator[Reference]:
    """The (kind, name) of all that a pod needs to start."""
    for volume in pod.spec.get("volumes") or []:
        yield from _volume_references(volume)
    for container in pod.containers:
        for variable in container.get("env") or []:
            source = variable.get("valueFrom") or {}
            if "secretKeyRef" in source:
                yield "Secret", source["secretKeyRef"]["name"]
            if "configMapKeyRef" in source:
                yield "ConfigMap", source["configMapKeyRef"]["name"]
        for source in container.get("envFrom") or []:
            if "secretRef" in source:
                yield "Secret", source["secretRef"]["name"]
            if "configMapRef" in source:
                yield "ConfigMap", source["configMapRef"]["name"]
    for secret in pod.spec.get("imagePullSecrets") or []:
        yield "Secret", secret["name"]
    if pod.spec.get("serviceAccountName"):
        yield "ServiceAccount", pod.spec["serviceAccountName"]


def _volume_references(volume: Json) -> Iterator[Reference]:
    if "secret" in volume:
        yield "Secret", volume["secret"]["secretName"]
    if "configMap" in volume:
        yield "ConfigMap", volume["configMap"]["name"]
    if "persistentVolumeClaim" in volume:
        yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]
    for source in (volume.get("projected") or {}).get("sources") or []:
        yield from _volume_references(
            {kind: value | {"secretName": value.get("name")} for kind, value in source.items() if "name" in value}
        )


def _other_references(manifests: Manifests) -> Iterator[tuple[str, Reference]]:
    """References of objects that make no pods."""
    for item in manifests.objects:
        name = f"{item['kind']} {item['metadata']['name']}"
        spec = item.get("spec") or {}
        if "scaleTargetRef" in spec:
            target = spec["scaleTargetRef"]
            yield name, (target.get("kind", "Deployment"), target["name"])
        for trigger in spec.get("triggers") or []:
            if "authenticationRef" in trigger:
                yield name, ("TriggerAuthentication", trigger["authenticationRef"]["name"])
        for subject in item.get("subjects") or []:
            yield name, (subject["kind"], subject["name"])
        if "roleRef" in item:
            yield name, (item["roleRef"]["kind"], item["roleRef"]["name"])


def missing_references(manifests: Manifests, outside: frozenset[Reference]) -> Iterator[str]:
    """References to what neither the release makes nor the user has: `outside` has (kind, name)."""
    here = {(item["kind"], item["metadata"]["name"]) for item in manifests.objects} | {("ServiceAccount", "default")}
    needed = [(pod.name, reference) for pod in manifests.pods for reference in references(pod)]
    for who, (kind, name) in [*needed, *_other_references(manifests)]:
        if (kind, name) not in here | outside:
            yield f"{who} needs {kind} {name}, which nobody makes."


def object_faults(manifests: Manifests) -> Iterator[str]:
    """Names are unique and belong to the release, the namespace is its own, and the usual labels are there."""
    seen = set()
    for item in manifests.objects:
        metadata = item["metadata"]
        name = f"{item['kind']} {metadata['name']}"
        if name in seen:
            yield f"{name} is there twice."
        seen.add(name)
        if metadata.get("namespace", NAMESPACE) != NAMESPACE:
            yield f"{name} is in the namespace {metadata['namespace']}."
        labels = metadata.get("labels") or {}
        for label, wanted in {"app.kubernetes.io/instance": RELEASE, "app.kubernetes.io/managed-by": "Helm"}.items():
            if labels.get(label) != wanted:
                yield f"{name} lacks the label {label}={wanted}."
        if "helm.sh/chart" not in labels:
            yield f"{name} lacks the label helm.sh/chart."


def container_faults(manifests: Manifests) -> Iterator[str]:
    """Containers have requests, a memory limit and a fixed image; only pods that call the API get a token of it."""
    with_rights = {
        subject["name"] for binding in manifests.of_kind("RoleBinding") for subject in binding.get("subjects") or []
    }
    for pod in manifests.pods:
        account = pod.spec.get("serviceAccountName", "default")
        if pod.spec.get("automountServiceAccountToken") is not False and account not in with_rights:
            yield f"{pod.name} gets a token of the API, which it does not need."
        for container in pod.containers:
            resources = container.get("resources") or {}
            if not {"cpu", "memory"} <= set(resources.get("requests") or {}):
                yield f"{pod.name}: {container['name']} requests no CPU or no memory."
            if "memory" not in (resources.get("limits") or {}):
                yield f"{pod.name}: {container['name']} has no memory limit."
            tag = container["image"].rpartition("/")[2].partition(":")[2]
            if tag in ("", "latest"):
                yield f"{pod.name}: {container['name']} has the image {container['image']}, which may change."


def hook_faults(manifests: Manifests) -> Iterator[str]:
    """A hook's object that has done its work goes: an uninstallation leaves hooks where they are."""
    for item in manifests.objects:
        annotations = item["metadata"].get("annotations") or {}
        policies = annotations.get("helm.sh/hook-delete-policy", "").split(",")
        if "helm.sh/hook" in annotations and not {"before-hook-creation", "hook-succeeded"} <= set(policies):
            yield f"{item['kind']} {item['metadata']['name']}, a hook, is left behind."


REFERENCE_CHECKS = (volume_faults, object_faults, container_faults, hook_faults)
