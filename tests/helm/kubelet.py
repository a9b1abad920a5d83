"""A rendered pod as processes on this machine, started, probed and ended in the order in which a kubelet does it.

Volumes are directories, and paths in arguments and variables lead there; 0.0.0.0 with a container port becomes a free
port of loopback, for the programs and for the probes alike. What it can't do: it has no namespaces (the root is not
read-only, users and limits are not applied) and restarts nothing by itself; a probe has as much patience as the tests
have, whatever its threshold.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2

from tests.e2e.stack import PATIENCE_SECONDS, free_port, health_of, wait_until
from tests.helm.manifests import Pod
from tests.helm.program import ENTRYPOINT, command_line
from tests.services.kv_support import clean_environment

Json = dict[str, Any]
Files = Mapping[str, Mapping[str, str]]
OCTAVO = (sys.executable, "-m", "services.cli")


@dataclass(frozen=True)
class Given:
    """What the cluster has besides the pod."""

    secrets: Files = field(default_factory=dict)
    """Files of each Secret, by name."""
    claims: Mapping[str, Path] = field(default_factory=dict)
    """Directories of claims, by name."""
    services: Mapping[str, str] = field(default_factory=dict)
    """Where each Service is on this machine, 'NAME.NAMESPACE.svc:PORT' to an address."""


NOTHING = Given()


class Container:
    """A container's process, and the files that it writes to."""

    def __init__(self, kubelet: Kubelet, spec: Json) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.kubelet = kubelet
        self.process: subprocess.Popen[bytes] | None = None
        self._log = kubelet.directory / f"{self.name}.log"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self.kubelet.words(self, command_line(self.spec)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.kubelet.environment(self),
            )
        self.kubelet.say(f"{self.name} started")

    def run(self, words: list[str], deadline: float) -> subprocess.CompletedProcess[str]:
        """Runs a command in the container, as exec does, to its end or the deadline; nothing is said of a bad exit."""
        return subprocess.run(
            self.kubelet.words(self, words),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline - time.monotonic(),
            env=self.kubelet.environment(self),
            check=False,
        )

    def probe(self, kind: str) -> int | None:
        """The status that a gRPC probe gets ('startupProbe', ...); None when nobody answers."""
        grpc_probe = self.spec[kind]["grpc"]
        return health_of(f"127.0.0.1:{self.kubelet.ports[grpc_probe['port']]}", grpc_probe.get("service", ""))

    def passes(self, kind: str) -> bool:
        return self.probe(kind) == health_pb2.HealthCheckResponse.SERVING

    def await_probe(self, kind: str) -> None:
        """Probes until it succeeds; fails when the process ends or patience does."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.passes(kind):
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}\n{self.log}"
            assert time.monotonic() < deadline, f"{kind} of {self.name} did not succeed\n{self.log}"
            time.sleep(0.05)
        self.kubelet.say(f"{self.name} {kind}")

    def wait(self, deadline: float) -> int:
        """The exit code; SIGKILL when the deadline passes."""
        assert self.process is not None
        try:
            code = self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kubelet.say(f"{self.name} SIGKILL")
            self.process.kill()
            code = self.process.wait()
        self.kubelet.say(f"{self.name} exited {code}")
        return code

    def terminate(self) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.kubelet.say(f"{self.name} SIGTERM")
            self.process.send_signal(signal.SIGTERM)


class Kubelet:
    """One pod in a directory. Use it as a context manager: what is left at the end is killed."""

    def __init__(self, pod: Pod, directory: Path, given: Given = NOTHING) -> None:
        self.pod = pod
        self.directory = directory
        self.ports = {port: free_port() for port in pod.ports.values()}
        self.events: list[str] = []
        self.hooks: list[str] = []
        """What the preStop hooks have said."""
        self._given = given
        self._volumes = {each["name"]: self._volume(each) for each in pod.spec.get("volumes") or []}
        self.init_containers = [Container(self, each) for each in pod.spec.get("initContainers") or []]
        self.containers = [Container(self, each) for each in pod.spec["containers"]]

    def __enter__(self) -> Kubelet:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Ends all containers at once, as a forced deletion."""
        for container in (*self.containers, *self.init_containers):
            if container.process is not None and container.process.poll() is None:
                container.process.kill()
                container.process.wait()

    def __getitem__(self, name: str) -> Container:
        return next(each for each in (*self.containers, *self.init_containers) if each.name == name)

    def say(self, event: str) -> None:
        self.events.append(event)

    def address(self, port_name: str) -> str:
        """Where a container port is, by its name."""
        return f"127.0.0.1:{self.ports[self.pod.ports[port_name]]}"

    def start(self) -> None:
        """Init containers one by one, sidecars up to their startup probe; then the others, until all are ready."""
        self._start_init_containers()
        for container in self.containers:
            container.start()
        for container in self.containers:
            container.await_probe("startupProbe")
        wait_until("readiness", self.is_ready)
        assert self.is_alive()

    def complete(self) -> str:
        """Runs a pod of one container that ends by itself, and gives its log. Fails on a bad exit."""
        self._start_init_containers()
        [container] = self.containers
        container.start()
        assert container.wait(time.monotonic() + PATIENCE_SECONDS) == 0, container.log
        return container.log

    def _start_init_containers(self) -> None:
        for container in self.init_containers:
            container.start()
            if container.spec.get("restartPolicy") == "Always":
                container.await_probe("startupProbe")
            else:
                assert container.wait(time.monotonic() + PATIENCE_SECONDS) == 0, container.log

    def is_ready(self) -> bool:
        """Whether every container that runs passes its readiness probe."""
        return all(each.passes("readinessProbe") for each in self._kept_up())

    def is_alive(self) -> bool:
        return all(each.passes("livenessProbe") for each in self._kept_up())

    def _kept_up(self) -> list[Container]:
        sidecars = [each for each in self.init_containers if each.spec.get("restartPolicy") == "Always"]
        return [*sidecars, *self.containers]

    def restart(self, name: str) -> None:
        """Starts a container again that has ended, as its restart policy wants it."""
        container = self[name]
        assert container.process is not None
        container.process.wait(PATIENCE_SECONDS)
        container.start()
        container.await_probe("startupProbe")

    def delete(self) -> dict[str, int]:
        """Ends the pod in its grace period: the containers, each after its preStop hook, then the sidecars backwards.

        Gives the exit codes. Call it from a thread of its own to see what happens meanwhile.
        """
        deadline = time.monotonic() + self.pod.spec["terminationGracePeriodSeconds"]
        threads = [threading.Thread(target=self._end, args=(each, deadline)) for each in self.containers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sidecars = [each for each in self._kept_up() if each not in self.containers]
        for container in reversed(sidecars):
            self._end(container, deadline)
        return {each.name: each.process.returncode for each in self._kept_up() if each.process is not None}

    def _end(self, container: Container, deadline: float) -> None:
        hook = (container.spec.get("lifecycle") or {}).get("preStop")
        if hook is not None:
            self.say(f"{container.name} preStop")
            done = container.run(hook["exec"]["command"], deadline)
            self.hooks.append(done.stdout)
            self.say(f"{container.name} preStop exited {done.returncode}")
        container.terminate()
        container.wait(deadline)

    def words(self, container: Container, words: list[str]) -> list[str]:
        """A command line as it is run here: our own interpreter, our paths and our ports."""
        program = OCTAVO if tuple(words[:1]) == ENTRYPOINT else tuple(words[:1])
        return [*program, *(self._here(container, word) for word in words[1:])]

    def environment(self, container: Container) -> dict[str, str]:
        """This process's environment without Octavo's settings, and the container's own."""
        own = {each["name"]: self._value(container, each) for each in container.spec.get("env") or []}
        temporary = {"TMPDIR": self._here(container, "/tmp")} if "/tmp" in self._mounts(container) else {}
        return clean_environment(**temporary, **own)

    def _value(self, container: Container, variable: Json) -> str:
        if "value" in variable:
            return self._here(container, variable["value"])
        reference = variable["valueFrom"]["secretKeyRef"]
        return self._given.secrets[reference["name"]][reference["key"]]

    def _here(self, container: Container, text: str) -> str:
        mounts = self._mounts(container)
        longest_first = "|".join(map(re.escape, sorted(mounts, key=len, reverse=True)))
        text = re.sub(rf"(?<![\w/.])({longest_first})(?=/|$)", lambda found: str(mounts[found[1]]), text)
        for name, address in self._given.services.items():
            text = text.replace(name, address)
        return re.sub(r"\b0\.0\.0\.0:(\d+)", lambda found: f"127.0.0.1:{self.ports[int(found[1])]}", text)

    def _mounts(self, container: Container) -> dict[str, Path]:
        return {each["mountPath"]: self._volumes[each["name"]] for each in container.spec.get("volumeMounts") or []}

    def _volume(self, volume: Json) -> Path:
        if "persistentVolumeClaim" in volume:
            return self._given.claims[volume["persistentVolumeClaim"]["claimName"]]
        path = self.directory / volume["name"]
        path.mkdir()
        # As a kubelet makes them for a pod with an fsGroup.
        path.chmod(0o2777)
        if "secret" in volume:
            for name, content in self._given.secrets[volume["secret"]["secretName"]].items():
                (path / name).write_text(content)
        elif "emptyDir" not in volume:
            raise NotImplementedError(f"The volume {volume['name']} is of a kind that is not mapped here.")
        return path
