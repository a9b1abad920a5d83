"""Each control of pod security finds a pod that is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helm.manifests import Pod
from tests.helm.planted import broken
from tests.helm.pod_security import restricted_faults

Json = dict[str, Any]


def of_pod(change: Callable[[Json], None]) -> Callable[[Pod], None]:
    return lambda pod: change(pod.spec.setdefault("securityContext", {}))


def of_container(change: Callable[[Json], None]) -> Callable[[Pod], None]:
    return lambda pod: change(pod.containers[0].setdefault("securityContext", {}))


def volume(kind: str) -> Callable[[Pod], None]:
    return lambda pod: pod.spec["volumes"].append({"name": "v", kind: {}})


PLANTED: list[tuple[str, Callable[[Pod], Any]]] = [
    ("HostProcess", of_pod(lambda context: context.update(windowsOptions={"hostProcess": True}))),
    ("Host Namespaces", lambda pod: pod.spec.update(hostNetwork=True)),
    ("Host Namespaces", lambda pod: pod.spec.update(hostPID=True)),
    ("Host Namespaces", lambda pod: pod.spec.update(hostIPC=True)),
    ("Privileged Containers", of_container(lambda context: context.update(privileged=True))),
    ("Capabilities", of_container(lambda context: context.update(capabilities={"drop": ["NET_RAW"]}))),
    ("Capabilities", of_container(lambda context: context["capabilities"].update(add=["SYS_ADMIN"]))),
    ("HostPath Volumes", volume("hostPath")),
    ("Host Ports", lambda pod: pod.containers[0]["ports"][0].update(hostPort=80)),
    ("Host Probes", lambda pod: pod.containers[0].update(livenessProbe={"httpGet": {"host": "10.0.0.1", "port": 1}})),
    (
        "Host Probes",
        lambda pod: pod.containers[0].update(lifecycle={"preStop": {"tcpSocket": {"host": "h", "port": 1}}}),
    ),
    ("AppArmor", of_container(lambda context: context.update(appArmorProfile={"type": "Unconfined"}))),
    (
        "AppArmor",
        lambda pod: pod.metadata.update(annotations={"container.apparmor.security.beta.kubernetes.io/a": "unconfined"}),
    ),
    ("SELinux", of_pod(lambda context: context.update(seLinuxOptions={"type": "spc_t"}))),
    ("SELinux", of_container(lambda context: context.update(seLinuxOptions={"user": "root"}))),
    ("/proc Mount Type", of_container(lambda context: context.update(procMount="Unmasked"))),
    ("Sysctls", of_pod(lambda context: context.update(sysctls=[{"name": "kernel.msgmax", "value": "1"}]))),
    ("Volume Types", volume("nfs")),
    ("Privilege Escalation", of_container(lambda context: context.update(allowPrivilegeEscalation=True))),
    ("Privilege Escalation", of_container(lambda context: context.pop("allowPrivilegeEscalation"))),
    ("Running as Non-root", of_container(lambda context: context.update(runAsNonRoot=False))),
    ("Running as Non-root user", of_container(lambda context: context.update(runAsUser=0))),
    ("Seccomp", of_container(lambda context: context.update(seccompProfile={"type": "Unconfined"}))),
    ("Read-only Root", of_container(lambda context: context.pop("readOnlyRootFilesystem"))),
]


@pytest.mark.parametrize(("control", "change"), PLANTED, ids=[f"{n} {i}" for i, (n, _) in enumerate(PLANTED)])
def test_each_control_of_pod_security_finds_its_fault(control: str, change: Callable[[Pod], Any]) -> None:
    [pod] = broken("default", lambda _: None).octavo_pods
    assert restricted_faults(pod, "1.33") == []
    change(pod)
    assert {fault.split(":")[0] for fault in restricted_faults(pod, "1.33")} - {"Volume Types"} <= {control}
    assert [fault for fault in restricted_faults(pod, "1.33") if fault.startswith(f"{control}:")]


def test_image_volumes_are_restricted_before_kubernetes_1_33() -> None:
    [pod] = broken("model in an image", lambda _: None).octavo_pods
    assert restricted_faults(pod, "1.33") == []
    assert restricted_faults(pod, "1.29") == ["Volume Types: volume model: image"]


def test_a_pod_of_a_hook_is_looked_at_too() -> None:
    manifests = broken("default", lambda objects: objects["Pod"]["spec"]["containers"][0].pop("securityContext"))
    assert {fault.split(":")[0] for pod in manifests.pods for fault in restricted_faults(pod, "1.33")} == {
        "Capabilities",
        "Privilege Escalation",
        "Read-only Root",
    }
