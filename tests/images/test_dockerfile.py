"""What the two images promise, read from the Dockerfile: who runs in them, what starts, what they are called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LABELS = ("title", "description", "version", "revision", "created", "source", "base.name")
TARGETS = ("kv-manager", "model-runner", "gateway")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage with those before it that it stands on; (instruction, value) in their order."""

    own: tuple[tuple[str, str], ...]
    all: tuple[tuple[str, str], ...]

    def last(self, instruction: str) -> str:
        return [value for name, value in self.all if name == instruction][-1]


def read_stages() -> dict[str, Stage]:
    """The stages by name."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stages: dict[str, Stage] = {}
    name = ""
    for line in filter(None, lines):
        instruction, value = line.split(maxsplit=1)
        if instruction == "FROM":
            base, name = value.split(" AS ")
            stages[name] = Stage((), stages[base].all if base in stages else ())
        elif name:
            step = (instruction, value)
            stages[name] = Stage((*stages[name].own, step), (*stages[name].all, step))
    return stages


@pytest.mark.parametrize(
    ("target", "entry", "command"),
    [("kv-manager", "octavo", "kv-manager"), ("model-runner", "octavo", "model-runner"), ("gateway", "smg", "--help")],
)
def test_an_image_runs_as_nobody_in_particular_and_is_its_command(target: str, entry: str, command: str) -> None:
    stage = read_stages()[target]
    assert stage.last("USER") == "10001:10001"
    assert json.loads(stage.last("ENTRYPOINT")) == [entry]
    assert json.loads(stage.last("CMD"))[0] == command
    assert stage.last("STOPSIGNAL") == "SIGTERM"
    assert "HEALTHCHECK" not in dict(stage.all)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_says_what_it_is(target: str) -> None:
    own = read_stages()[target].own
    [said] = (value for name, value in own if name == "LABEL")
    labels = dict(re.findall(r'org\.opencontainers\.image\.([a-z.]+)="([^"]+)"', said))
    assert set(labels) == set(LABELS)
    arguments = {value.split("=")[0] for name, value in own if name == "ARG"}
    assert set(re.findall(r"\$\{(\w+)\}", said)) <= arguments


def test_a_compiler_is_in_no_image_but_the_one_for_gpus() -> None:
    for target in TARGETS:
        installs = [value for name, value in read_stages()[target].all if name == "RUN" and "apt-get install" in value]
        assert all(each.startswith('if [ "${ACCELERATOR}" = gpu ]; then ') for each in installs)
        assert len(installs) == (target == "model-runner")


def test_all_that_is_copied_is_let_in() -> None:
    """.dockerignore names what it lets in; a folder that is copied and not let in would be empty."""
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [value for stage in read_stages().values() for name, value in stage.own if name == "COPY"]
    sources = {each for value in copied if "--from=" not in value for each in value.split()[:-1]}
    assert sources
    for source in sources:
        pattern = "docker/*.lock" if source.endswith(".lock") else source
        assert pattern in let_in, source
        assert "$" in source or (ROOT / source).exists(), source


def test_the_chart_asks_for_these_images() -> None:
    """docker/build names an image IMAGE_PREFIX/TARGET, and model-runner-gpu with ACCELERATOR=gpu."""
    chart = ROOT / "helm" / "octavo"
    values, gpu = (yaml.safe_load((chart / name).read_text()) for name in ("values.yaml", "values-gpu.yaml"))
    asked = {values["image"]["runner"]["repository"], values["image"]["kvManager"]["repository"]}
    assert asked == {"octavo/model-runner", "octavo/kv-manager"}
    assert values["gateway"]["image"]["repository"] == "octavo/gateway"
    assert gpu["image"]["runner"]["repository"] == "octavo/model-runner-gpu"
    assert {"kv-manager", "model-runner", "gateway"} == set(TARGETS) <= set(read_stages())
    assert f"{values['image']['registry']}/octavo" in (ROOT / "docker" / "build").read_text()


def test_every_package_of_the_wheel_is_copied() -> None:
    packages = re.findall(
        r'(?m)^    "([a-z_]+)[."]', (ROOT / "pyproject.toml").read_text().split("[tool.setuptools]")[1]
    )
    copied = " ".join(value for name, value in read_stages()["octavo"].own if name == "COPY")
    for package in {"protos/octavo" if each == "octavo" else each for each in packages}:
        assert package in copied.split(), package
