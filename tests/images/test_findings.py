"""hadolint and trivy find nothing in the Dockerfile and the rendered chart but what is accepted, with a reason."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.helm.cases import CASES, rendered
from tests.required import require_program

ROOT = Path(__file__).parents[2]
INSTALL = "`make test` brings it on Linux x86_64"
PATIENCE_SECONDS = 300
GRAVE = {"error", "warning", "CRITICAL", "HIGH", "MEDIUM"}


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that a linter found."""

    tool: str
    rule: str
    where: str
    message: str


def accepted() -> set[tuple[str, str]]:
    entries = yaml.safe_load((Path(__file__).parent / "accepted_findings.yaml").read_text())
    assert all(len(each["reason"]) > 20 for each in entries)
    return {(each["tool"], each["rule"]) for each in entries}


def hadolint(dockerfile: Path) -> set[Finding]:
    said = json.loads(run(require_program("hadolint", INSTALL), "--no-fail", "--format", "json", dockerfile))
    return {
        Finding("hadolint", each["code"], f"line {each['line']}", each["message"])
        for each in said
        if each["level"] in GRAVE
    }


def trivy(directory: Path) -> set[Finding]:
    flags = ("--skip-check-update", "--skip-version-check", "--disable-telemetry", "--quiet", "--format", "json")
    said = json.loads(run(require_program("trivy", INSTALL), "config", *flags, directory))
    return {
        Finding("trivy", each["ID"], result["Target"], each["Message"])
        for result in said.get("Results", [])
        for each in result.get("Misconfigurations", [])
        if each["Severity"] in GRAVE
    }


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> set[Finding]:
    """All that both find, in one run of each."""
    directory = tmp_path_factory.mktemp("scanned")
    (directory / "Dockerfile").write_text((ROOT / "Dockerfile").read_text())
    for name in CASES:
        # Dashboards and rules are long, and nothing in them runs.
        objects = [each for each in rendered(name).objects if each["kind"] not in ("ConfigMap", "PrometheusRule")]
        (directory / f"{name.replace(' ', '-')}.yaml").write_text(yaml.safe_dump_all(objects))
    return hadolint(ROOT / "Dockerfile") | trivy(directory)


def test_nothing_grave_but_what_is_accepted(findings: set[Finding]) -> None:
    assert sorted(each for each in findings if (each.tool, each.rule) not in accepted()) == []


def test_what_is_accepted_is_still_found(findings: set[Finding]) -> None:
    assert accepted() - {(each.tool, each.rule) for each in findings} == set()


def test_faults_are_found(tmp_path: Path) -> None:
    """An image that runs as root, by a shell; a pod that is privileged."""
    (tmp_path / "Dockerfile").write_text("FROM debian:12\nUSER root\nENTRYPOINT octavo\n")
    box = {"name": "a", "image": "a:1", "securityContext": {"privileged": True}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [box]}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    rules = {each.rule for each in hadolint(tmp_path / "Dockerfile") | trivy(tmp_path)}
    assert {"DL3002", "DL3025", "DS-0002", "KSV-0017", "KSV-0014"} <= rules
