"""What the two images promise, read from the Dockerfile: who runs in them, what starts, what they are called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LABELS = ("title", "description", "version", "revision", "created", "source", "base.name")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage with those before it that it stands on; (instruction, value) in their order."""

    own: tuple[tuple[str, str], ...]
    all: tuple[tuple[str, str], ...]

    def last(self, instruction: str) -> str:
        return [value for name, value in self.all if name == instruction][-1]


def read_stages(accelerator: str) -> dict[str, Stage]:
    """The stages by name."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stages: dict[str, Stage] = {}
    name = ""
    for line in filter(None, lines):
        instruction, value = line.split(maxsplit=1)
        if instruction == "FROM":
            base, name = value.replace("${ACCELERATOR}", accelerator).split(" AS ")
            stages[name] = Stage((), stages[base].all if base in stages else ())
        elif name:
            step = (instruction, value)
            stages[name] = Stage((*stages[name].own, step), (*stages[name].all, step))
    return stages


@pytest.mark.parametrize("accelerator", ["cpu", "gpu"])
@pytest.mark.parametrize("target", ["kv-manager", "model-runner"])
def test_an_image_runs_as_nobody_in_particular_and_is_its_command(target: str, accelerator: str) -> None:
    stage = read_stages(accelerator)[target]
    assert stage.last("USER") == "10001:10001"
    assert json.loads(stage.last("ENTRYPOINT")) == ["octavo"]
    assert json.loads(stage.last("CMD"))[0] == target
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    assert "HEALTHCHECK" not in dict(stage.all)


@pytest.mark.parametrize("target", ["kv-manager", "model-runner"])
def test_an_image_says_what_it_is(target: str) -> None:
    own = read_stages("cpu")[target].own
    [said] = (value for name, value in own if name == "LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]+)"', said))
    assert set(labels) == set(LABELS)
    arguments = {value.split("=")[0] for name, value in own if name == "ARG"}
    assert set(re.findall(r"\$\{(\w+)\}", said)) <= arguments


def test_a_compiler_is_in_no_image_but_the_one_for_gpus() -> None:
    for accelerator in ("cpu", "gpu"):
        for target in ("kv-manager", "model-runner"):
            steps = read_stages(accelerator)[target].all
            installs = [value for name, value in steps if name == "RUN" and "apt-get install" in value]
            assert len(installs) == (1 if (target, accelerator) == ("model-runner", "gpu") else 0)


def test_all_that_is_copied_is_let_in() -> None:
    """.dockerignore names what it lets in; a folder that is copied and not let in would be empty."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [value for stage in read_stages("cpu").values() for name, value in stage.own if name == "COPY"]
    sources = {each for value in copied if "--from=" not in value for each in value.split()[:-1]}
    assert sources
    for source in sources:
        pattern = "docker/*.lock" if source.endswith(".lock") else source
        assert pattern in let_in, source
        assert "$" in source or (ROOT / source).exists(), source


def test_every_package_of_the_wheel_is_copied() -> None:
    packages = re.findall(
        r'(?m)^    "([a-z_]+)[."]', (ROOT / "pyproject.toml").read_text().split("[tool.setuptools]")[1]
    )
    copied = " ".join(value for name, value in read_stages("cpu")["octavo"].own if name == "COPY")
    for package in {"protos/octavo" if each == "octavo" else each for each in packages}:
        assert package in copied.split(), package
