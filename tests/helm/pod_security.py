"""The Pod Security Standard "restricted", each control by its name, and a read-only root on top.

Written from https://kubernetes.io/docs/concepts/security/pod-security-standards/ and, for image volumes, from what the
admission controller does since Kubernetes 1.33.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.helm.manifests import Pod

Json = dict[str, Any]
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.ping_group_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
}
VOLUME_TYPES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
APPARMOR_ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"


def restricted_faults(pod: Pod, kubernetes: str) -> list[str]:
    """'CONTROL: WHERE: WHAT' for all that the restricted profile of a Kubernetes version would not admit."""
    controls = {**CONTROLS, "Volume Types": _volumes(kubernetes)}
    return [f"{name}: {where}" for name, control in controls.items() for where in control(pod)]


def _contexts(pod: Pod) -> Iterator[tuple[str, Json]]:
    """The security contexts of the pod and of each container."""
    yield "pod", pod.spec.get("securityContext") or {}
    yield from _container_contexts(pod)


def _container_contexts(pod: Pod) -> Iterator[tuple[str, Json]]:
    for each in [*pod.containers, *(pod.spec.get("ephemeralContainers") or [])]:
        yield each["name"], each.get("securityContext") or {}


def _host_process(pod: Pod) -> Iterator[str]:
    for where, context in _contexts(pod):
        if (context.get("windowsOptions") or {}).get("hostProcess"):
            yield f"{where}: hostProcess"


def _host_namespaces(pod: Pod) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(name):
            yield f"pod: {name}"


def _privileged(pod: Pod) -> Iterator[str]:
    for where, context in _container_contexts(pod):
        if context.get("privileged"):
            yield f"{where}: privileged"


def _capabilities(pod: Pod) -> Iterator[str]:
    for where, context in _container_contexts(pod):
        capabilities = context.get("capabilities") or {}
        if "ALL" not in (capabilities.get("drop") or []):
            yield f"{where}: does not drop ALL"
        for added in set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
            yield f"{where}: adds {added}"


def _host_path(pod: Pod) -> Iterator[str]:
    for volume in pod.spec.get("volumes") or []:
        if "hostPath" in volume:
            yield f"volume {volume['name']}"


def _host_ports(pod: Pod) -> Iterator[str]:
    for each in pod.containers:
        for port in each.get("ports") or []:
            if port.get("hostPort"):
                yield f"{each['name']}: port {port['hostPort']}"


def _probe_hosts(pod: Pod) -> Iterator[str]:
    for each in pod.containers:
        hooks = (each.get("lifecycle") or {}).values()
        probes = [each.get(name) or {} for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        for handler in (*hooks, *probes):
            for kind in ("httpGet", "tcpSocket"):
                if (handler.get(kind) or {}).get("host"):
                    yield f"{each['name']}: {kind} of host {handler[kind]['host']}"


def _app_armor(pod: Pod) -> Iterator[str]:
    for where, context in _contexts(pod):
        kind = (context.get("appArmorProfile") or {}).get("type")
        if kind not in (None, "RuntimeDefault", "Localhost"):
            yield f"{where}: {kind}"
    for name, value in (pod.metadata.get("annotations") or {}).items():
        if name.startswith(APPARMOR_ANNOTATION) and value != "runtime/default" and not value.startswith("localhost/"):
            yield f"pod: {name}={value}"


def _selinux(pod: Pod) -> Iterator[str]:
    for where, context in _contexts(pod):
        options = context.get("seLinuxOptions") or {}
        if options.get("type") not in SELINUX_TYPES or options.get("user") or options.get("role"):
            yield f"{where}: {options}"


def _proc_mount(pod: Pod) -> Iterator[str]:
    for where, context in _container_contexts(pod):
        if context.get("procMount") not in (None, "Default"):
            yield f"{where}: {context['procMount']}"


def _sysctls(pod: Pod) -> Iterator[str]:
    for each in (pod.spec.get("securityContext") or {}).get("sysctls") or []:
        if each["name"] not in SAFE_SYSCTLS:
            yield f"pod: {each['name']}"


def _volumes(kubernetes: str) -> Callable[[Pod], Iterator[str]]:
    major, minor = map(int, kubernetes.split("."))
    allowed = VOLUME_TYPES | ({"image"} if (major, minor) >= (1, 33) else set())

    def control(pod: Pod) -> Iterator[str]:
        for volume in pod.spec.get("volumes") or []:
            for kind in set(volume) - {"name"} - allowed:
                yield f"volume {volume['name']}: {kind}"

    return control


def _escalation(pod: Pod) -> Iterator[str]:
    for where, context in _container_contexts(pod):
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{where}: allowPrivilegeEscalation is not false"


def _effective(pod: Pod, field: str) -> Iterator[tuple[str, Any]]:
    """What each container has of a field: its own, or the pod's."""
    of_pod = (pod.spec.get("securityContext") or {}).get(field)
    for where, context in _container_contexts(pod):
        yield where, context.get(field, of_pod)


def _non_root(pod: Pod) -> Iterator[str]:
    for where, value in _effective(pod, "runAsNonRoot"):
        if value is not True:
            yield f"{where}: runAsNonRoot is not true"


def _non_root_user(pod: Pod) -> Iterator[str]:
    for where, context in _contexts(pod):
        if context.get("runAsUser") == 0:
            yield f"{where}: runAsUser is 0"


def _seccomp(pod: Pod) -> Iterator[str]:
    for where, value in _effective(pod, "seccompProfile"):
        if (value or {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{where}: {(value or {}).get('type')}"
    if ((pod.spec.get("securityContext") or {}).get("seccompProfile") or {}).get("type") == "Unconfined":
        yield "pod: Unconfined"


def _read_only_root(pod: Pod) -> Iterator[str]:
    for where, context in _container_contexts(pod):
        if context.get("readOnlyRootFilesystem") is not True:
            yield f"{where}: readOnlyRootFilesystem is not true"


CONTROLS: dict[str, Callable[[Pod], Iterator[str]]] = {
    "HostProcess": _host_process,
    "Host Namespaces": _host_namespaces,
    "Privileged Containers": _privileged,
    "Capabilities": _capabilities,
    "HostPath Volumes": _host_path,
    "Host Ports": _host_ports,
    "Host Probes": _probe_hosts,
    "AppArmor": _app_armor,
    "SELinux": _selinux,
    "/proc Mount Type": _proc_mount,
    "Sysctls": _sysctls,
    "Privilege Escalation": _escalation,
    "Running as Non-root": _non_root,
    "Running as Non-root user": _non_root_user,
    "Seccomp": _seccomp,
    "Read-only Root": _read_only_root,
}
