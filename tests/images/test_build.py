"""`docker/build` asks for the right target, tag and arguments; what builds here only writes down what it is asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from services.metrics import octavo_version

ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """A `podman` that writes its arguments to a file, a line each, and an empty line after a call."""
    program = tmp_path / "podman"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" "" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    return program


def build(engine: Path, *targets: str, **variables: str) -> list[list[str]]:
    """The arguments of each call."""
    env = {"PATH": f"{engine.parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")} | variables
    subprocess.run([ROOT / "docker" / "build", *targets], env=env, check=True, timeout=60)
    calls = (engine.parent / "calls").read_text().removesuffix("\n\n").split("\n\n")
    return [call.split("\n") for call in calls]


def of(call: list[str]) -> dict[str, str]:
    """The build arguments of a call."""
    pairs = (call[place + 1] for place, word in enumerate(call) if word == "--build-arg")
    return dict(pair.split("=", 1) for pair in pairs)


def test_both_images_are_tagged_by_version(engine: Path) -> None:
    first, second = build(engine, "kv-manager", "model-runner")
    version = octavo_version()
    assert first[:5] == ["build", "--target", "kv-manager", "--tag", f"localhost/octavo/kv-manager:{version}"]
    assert second[:5] == ["build", "--target", "model-runner", "--tag", f"localhost/octavo/model-runner:{version}"]
    assert (of(first)["VERSION"], of(first)["ACCELERATOR"]) == (version, "cpu")
    assert "BASE_IMAGE" not in of(first)
    assert first[-1] == "."


def test_what_is_asked_for_is_handed_on(engine: Path) -> None:
    asked = {"ACCELERATOR": "gpu", "BASE_IMAGE": "a/b@sha256:1", "IMAGE_PREFIX": "r.example/f/octavo"}
    asked |= {"DEMO_MODEL": "0", "BUILD_PACKAGES": "g++ python3-dev", "TORCH_CPU_INDEX": ""}
    [call] = build(engine, "model-runner", BUILD_FLAGS="--pull --no-cache", SOURCE_URL="https://x", **asked)
    assert call[4] == f"r.example/f/octavo/model-runner-gpu:{octavo_version()}"
    given = of(call)
    assert (given["ACCELERATOR"], given["BASE_IMAGE"], given["DEMO_MODEL"]) == ("gpu", "a/b@sha256:1", "0")
    assert given["SOURCE"] == "https://x"
    assert (given["BUILD_PACKAGES"], given["TORCH_CPU_INDEX"]) == ("g++ python3-dev", "")
    assert "GPU_PACKAGES" not in given
    assert call[-3:] == ["--pull", "--no-cache", "."]


def test_labels_have_the_commit_and_its_time(engine: Path) -> None:
    git = ("git", "-C", str(ROOT), "log", "-1", "--format=%H %cI")
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.split()
    [call] = build(engine, "kv-manager")
    revision, created = head or ("unknown", "unknown")
    assert of(call)["REVISION"] in (revision, f"{revision}-modified")
    assert of(call)["CREATED"] == created
