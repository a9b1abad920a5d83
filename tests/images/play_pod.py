"""Runs the chart's pod for real with podman, on images that `make image` has built: `make image-test`.

    python -m tests.images.play_pod [--prefix localhost/octavo] [--tag 0.1.0]

Not among the tests: images take minutes and gigabytes. Prints a line for each thing that it has seen, and ends with
exit code 1 at the first that is not so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.client import Client
from services.metrics import octavo_version
from tests.e2e.stack import free_port
from tests.helm.tools import CHART, helm
from tests.images.pod import deployment_of, playable, pre_stop_of

PATIENCE_SECONDS = 300
POD = "octavo-image-test"
FACTS = """
import json, os
status = dict(line.rstrip().split(":", 1) for line in open("/proc/1/status") if ":" in line)
try:
    open("/written", "w")
    root = "writable"
except OSError as error:
    root = error.strerror
print(json.dumps({"uid": os.getuid(), "gid": os.getgid(), "root": root, "capabilities": int(status["CapEff"], 16),
                  "no_new_privileges": int(status["NoNewPrivs"])}))
"""
WANTED = {"uid": 10001, "gid": 10001, "root": "Read-only file system", "capabilities": 0, "no_new_privileges": 1}


def main() -> None:
    """Plays the pod, looks at it, lets it serve, drains it and takes it away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default="localhost/octavo", help="What comes before the images' names.")
    parser.add_argument("--tag", default=octavo_version(), help="The images' tag.")
    given = parser.parse_args()
    if shutil.which("podman") is None:
        sys.exit("podman is not installed.")
    with tempfile.TemporaryDirectory(prefix="octavo-pod-") as directory:
        deployment = deployment_of(render(Path(directory), given.prefix, given.tag))
        pod, ports = playable(deployment, POD, free_port)
        path = Path(directory) / "pod.yaml"
        path.write_text(yaml.safe_dump(pod))
        podman("play", "kube", str(path))
        try:
            look_at(ports)
            serve_and_drain(deployment, ports)
        except BaseException:
            for name in ("kv-manager", "model-runner"):
                print(podman("logs", "--tail", "20", f"{POD}-{name}", check=False), file=sys.stderr)
            raise
        finally:
            podman("play", "kube", "--down", str(path), check=False)


def render(directory: Path, prefix: str, tag: str) -> list[dict[str, Any]]:
    """The chart's objects with its default values."""
    registry, _, folder = prefix.partition("/")
    images = [f"image.registry={registry}"]
    for key, name in (("runner", "model-runner"), ("kvManager", "kv-manager")):
        images += [f"image.{key}.repository={folder}/{name}", f"image.{key}.tag={tag}"]
    done = helm("template", "octavo", CHART, "--set", ",".join(images), home=directory)
    if done.returncode:
        sys.exit(done.stderr)
    return [each for each in yaml.safe_load_all(done.stdout) if each]


def look_at(ports: dict[int, int]) -> None:
    """Both containers as the security context wants them, and healthy in the order of a kubelet."""
    for name, health in (("kv-manager", 50053), ("model-runner", 50052)):
        wait_until_ready(ports[health])
        facts = json.loads(inside(name, "python3", "-c", FACTS))
        expect(f"{name} runs as it should", facts, WANTED)
    expect("the books add up", inside("kv-manager", "octavo", "check", "--json").count('"ok": true'), 1)
    expect(
        "octavo pool in the runner's container",
        json.loads(inside("model-runner", "octavo", "pool", "--json"))["pool_id"],
        "default",
    )


def serve_and_drain(deployment: dict[str, Any], ports: dict[int, int]) -> None:
    """A stream lasts through the preStop hook; then both end with code 0."""
    with Client(f"127.0.0.1:{ports[50051]}") as client:
        stream = client.generate("Once upon a time", max_tokens=200, ignore_eos=True)
        first = next(stream)
        command = ["podman", "exec", f"{POD}-model-runner", *pre_stop_of(deployment)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hook:
            last = [first, *stream][-1]
            said = hook.communicate(timeout=PATIENCE_SECONDS)[0]
    expect("the stream ended whole while the pod was drained", last.usage.output_tokens, 200)
    expect(f"the hook said: {said.strip()}", hook.returncode, 0)
    for name in ("model-runner", "kv-manager"):
        podman("stop", f"{POD}-{name}")
        code = podman("inspect", "--format", "{{.State.ExitCode}}", f"{POD}-{name}").strip()
        expect(f"{name} ended at SIGTERM", code, "0")


def wait_until_ready(port: int) -> None:
    """Asks for `readiness` until it is SERVING."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    request = health_pb2.HealthCheckRequest(service="readiness")
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < deadline:
            try:
                if stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.2)
    raise SystemExit(f"Nothing is ready on port {port} after {PATIENCE_SECONDS} seconds.")


def inside(name: str, *command: str) -> str:
    """What a command in a container writes."""
    return podman("exec", f"{POD}-{name}", *command)


def podman(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    if check and done.returncode:
        raise SystemExit(f"podman {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def expect(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise SystemExit(f"{what}: {found!r} and not {wanted!r}.")
    print(f"ok  {what}")


if __name__ == "__main__":
    main()
