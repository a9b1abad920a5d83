"""What the rendered chart says to the programs: flags, variables, addresses and times."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from tests.helm.manifests import Manifests, Pod
from tests.helm.program import ENVIRONMENT, command_line, flags_of, is_known_variable, options, refusal

Json = dict[str, Any]
FOREIGN = {"hf": ("hf", "download"), "smg": ("smg", "launch")}
"""Programs of others that containers run, with the command that is run."""


def commands(pod: Pod) -> Iterator[tuple[str, list[str]]]:
    """Every command line that a pod runs, by container: its own, its probes' and its hooks'."""
    for container in pod.containers:
        yield container["name"], command_line(container)
        hooks = (container.get("lifecycle") or {}).values()
        probes = [container.get(name) or {} for name in ("startupProbe", "livenessProbe", "readinessProbe")]
        for handler in (*hooks, *probes):
            if "exec" in handler:
                yield container["name"], handler["exec"]["command"]


def flag_faults(manifests: Manifests) -> Iterator[str]:
    """Every argument is one that its program takes, with a value that it takes."""
    for pod in manifests.pods:
        for name, words in commands(pod):
            yield from (f"{pod.name}: {name}: {fault}" for fault in _flag_faults(words))


def _flag_faults(words: list[str]) -> Iterator[str]:
    program, *rest = words
    if program == "octavo":
        if fault := refusal(rest):
            yield fault
    elif program in FOREIGN:
        for flag in sorted({f"--{name}" for name in options(rest)} - flags_of(*FOREIGN[program])):
            yield f"{program} has no option {flag}."
    elif program == "python3":
        yield from _script_faults(rest)
    else:
        yield f"{program} is no program of the images."


def _script_faults(words: list[str]) -> Iterator[str]:
    """A script on the command line is one that Python can read."""
    try:
        option, script = words
        ast.parse(script)
    except (ValueError, SyntaxError) as error:
        yield f"python3: {error}"
    else:
        if option != "-c":
            yield f"python3 has {option}, not -c."


def variable_faults(manifests: Manifests) -> Iterator[str]:
    """Every OCTAVO_ variable is one that our programs read."""
    for pod in manifests.pods:
        for container in pod.containers:
            names = [each["name"] for each in container.get("env") or []]
            for name in names:
                if name.startswith(ENVIRONMENT) and not is_known_variable(name):
                    yield f"{pod.name}: {container['name']}: no program reads {name}."
            for name in sorted({each for each in names if names.count(each) > 1}):
                yield f"{pod.name}: {container['name']}: {name} is there twice."


def sidecar_faults(manifests: Manifests) -> Iterator[str]:
    """The KV manager is a native sidecar: an init container that is kept up and gates the runner by a startup probe."""
    for pod in manifests.octavo_pods:
        found = [each for each in pod.spec.get("initContainers") or [] if each["name"] == "kv-manager"]
        if not found:
            yield f"{pod.name}: kv-manager is no init container."
        for container in found:
            if container.get("restartPolicy") != "Always":
                yield f"{pod.name}: kv-manager is not kept up (restartPolicy: Always)."
            if "startupProbe" not in container:
                yield f"{pod.name}: kv-manager has no startupProbe, so that the runner starts before it serves."


def socket_faults(manifests: Manifests) -> Iterator[str]:
    """Both ends of a Unix socket name the same file, in one volume that both containers have at the same place."""
    for pod in manifests.octavo_pods:
        manager, runner = pod.container("kv-manager"), pod.container("model-runner")
        ours, theirs = options(command_line(manager)), options(command_line(runner))
        if ours.get("kv-address") != theirs.get("kv-address"):
            where = f"{ours.get('kv-address')}, the runner looks at {theirs.get('kv-address')}"
            yield f"{pod.name}: the KV manager is at {where}."
        for container in (manager, runner):
            for address in _sockets(options(command_line(container))):
                if _volume_at(container, address) is None:
                    yield f"{pod.name}: {container['name']} has no volume for its socket {address}."
        place = ours.get("kv-address", "")
        if _volume_at(manager, place) != _volume_at(runner, place):
            yield f"{pod.name}: the containers have different volumes at {place}."
        for words in _pre_stops(runner):
            if options(words).get("admin-address") != theirs.get("runner-admin-address"):
                yield f"{pod.name}: preStop drains {options(words).get('admin-address')}, which is not the runner's."


def _sockets(found: dict[str, str]) -> list[str]:
    return [value for value in found.values() if value.startswith("unix:")]


def _volume_at(container: Json, address: str) -> str | None:
    """The volume in which a socket lies."""
    path = PurePosixPath(address.removeprefix("unix:"))
    mounts = {each["mountPath"]: each["name"] for each in container.get("volumeMounts") or []}
    return next((mounts[str(parent)] for parent in path.parents if str(parent) in mounts), None)


def _pre_stops(container: Json) -> list[list[str]]:
    hook = (container.get("lifecycle") or {}).get("preStop") or {}
    return [hook["exec"]["command"]] if "exec" in hook else []


def time_faults(manifests: Manifests) -> Iterator[str]:
    """The pod has more time than its preStop hook and both services take, one after the other."""
    for pod in manifests.octavo_pods:
        runner, manager = pod.container("model-runner"), pod.container("kv-manager")
        steps = [(words, ("lame-duck-seconds", "drain-seconds")) for words in _pre_stops(runner)]
        if not steps:
            yield f"{pod.name}: nothing drains the runner (preStop)."
        steps += [(command_line(each), ("grace-seconds",)) for each in (runner, manager)]
        needed = 0.0
        for words, names in steps:
            for name in names:
                if name not in options(words):
                    yield f"{pod.name}: {' '.join(words[:2])} has no --{name}."
                needed += float(options(words).get(name, 0))
        given = pod.spec.get("terminationGracePeriodSeconds", 30)
        if given <= needed:
            yield f"{pod.name}: terminationGracePeriodSeconds is {given}, and stopping takes up to {needed:g}."


PROGRAM_CHECKS = (flag_faults, variable_faults, sidecar_faults, socket_faults, time_faults)
