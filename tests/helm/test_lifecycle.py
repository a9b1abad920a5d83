"""A release's life with real helm, 3 and 4, on the stand-in API: install to uninstall, and upgrades that fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helm.stand_in_api import StandInApi
from tests.helm.stand_in_http import serving
from tests.helm.stand_in_resources import MONITORING
from tests.helm.tools import CHART, HELM_VERSIONS, HelmVersion, helm

PATIENCE = ("--wait", "--timeout", "120s")
ROLL_BACK: dict[HelmVersion, str] = {"3": "--atomic", "4": "--rollback-on-failure"}
both = pytest.mark.parametrize("version", HELM_VERSIONS)


@dataclass(frozen=True)
class Release:
    """A release called demo on a stand-in API."""

    api: StandInApi
    version: HelmVersion
    home: Path
    kubeconfig: Path

    def helm(self, command: str, *arguments: str | Path, fails: bool = False) -> str:
        """Runs helm on the release, and gives all that it says."""
        done = helm(command, "demo", *arguments, version=self.version, home=self.home, kubeconfig=self.kubeconfig)
        said = done.stdout + done.stderr
        assert (done.returncode != 0) is fails, said
        return said

    def statuses(self) -> list[str]:
        """The status of each revision, oldest first."""
        lines = self.helm("history").splitlines()[1:]
        return [line.split("\t")[2].strip() for line in lines]

    def image(self) -> str:
        containers = self.api.one("Deployment")["spec"]["template"]["spec"]["containers"]
        return str(containers[0]["image"])


@contextmanager
def released(version: HelmVersion, home: Path, chart: Path = CHART, *values: str) -> Iterator[Release]:
    """An installed release."""
    api = StandInApi("1.33", MONITORING)
    with serving(api, home) as kubeconfig:
        release = Release(api, version, home, kubeconfig)
        release.helm("install", chart, *PATIENCE, *values)
        yield release


def own_chart(directory: Path, old: str, new: str) -> Path:
    """A copy of the chart whose Deployment has one line changed."""
    chart = directory / "octavo"
    shutil.copytree(CHART, chart)
    deployment = chart / "templates" / "deployment.yaml"
    text = deployment.read_text()
    assert old in text
    deployment.write_text(text.replace(old, new, 1))
    return chart


@both
def test_from_install_to_uninstall(version: HelmVersion, tmp_path: Path) -> None:
    with released(version, tmp_path) as release:
        api = release.api
        assert api.one("Deployment")["spec"]["replicas"] == 1
        assert {"PodMonitor", "NetworkPolicy", "PodDisruptionBudget"} <= set(api.kinds())

        said = release.helm("test", "--logs", "--timeout", "120s")
        assert "Phase:          Succeeded" in said
        assert "POD LOGS: demo-octavo-test" in said

        upgrade = ("--set", "replicaCount=3", "--set", "image.runner.tag=9.9.9", "--set", "podLabels.colour=blue")
        release.helm("upgrade", CHART, *PATIENCE, *upgrade)
        assert api.one("Deployment")["spec"]["replicas"] == 3
        assert release.image().endswith("octavo/model-runner:9.9.9")
        assert api.one("Deployment")["spec"]["template"]["metadata"]["labels"]["colour"] == "blue"
        assert release.statuses() == ["superseded", "deployed"]

        release.helm("rollback", "1", *PATIENCE)
        assert api.one("Deployment")["spec"]["replicas"] == 1
        assert release.image().endswith("octavo/model-runner:0.1.0")
        assert "colour" not in api.one("Deployment")["spec"]["template"]["metadata"]["labels"]
        assert release.statuses() == ["superseded", "superseded", "deployed"]

        release.helm("uninstall", *PATIENCE)
        assert api.kinds() == []


@both
def test_an_upgrade_of_values_alone_restarts_nothing_that_it_does_not_change(
    version: HelmVersion, tmp_path: Path
) -> None:
    with released(version, tmp_path) as release:
        before = release.api.one("Deployment")["spec"]["template"]
        release.helm("upgrade", CHART, *PATIENCE, "--set", "replicaCount=2", "--set", "networkPolicy.enabled=false")
        assert release.api.one("Deployment")["spec"]["template"] == before
        assert "NetworkPolicy" not in release.api.kinds()


@both
def test_an_upgrade_with_a_wrong_type_fails_and_rolls_back(version: HelmVersion, tmp_path: Path) -> None:
    wrong = own_chart(tmp_path, "terminationGracePeriodSeconds: ", 'terminationGracePeriodSeconds: "soon" # ')
    with released(version, tmp_path) as release:
        spec = release.api.one("Deployment")["spec"]
        said = release.helm("upgrade", wrong, *PATIENCE, ROLL_BACK[version], fails=True)
        assert "terminationGracePeriodSeconds" in said
        assert "has been rolled back" in said
        assert release.api.one("Deployment")["spec"] == spec
        assert release.statuses() == ["superseded", "failed", "deployed"]


def test_helm_4_fails_at_a_misspelt_field_and_rolls_back(tmp_path: Path) -> None:
    misspelt = own_chart(tmp_path, "terminationGracePeriodSeconds: ", "terminationGracePeriodSecs: ")
    with released("4", tmp_path) as release:
        spec = release.api.one("Deployment")["spec"]
        said = release.helm("upgrade", misspelt, *PATIENCE, ROLL_BACK["4"], fails=True)
        assert "strict decoding error: spec.template.spec" in said
        assert "'terminationGracePeriodSecs' was unexpected" in said
        assert release.api.one("Deployment")["spec"] == spec
        assert release.statuses() == ["superseded", "failed", "deployed"]


def test_helm_3_only_warns_of_a_misspelt_field(tmp_path: Path) -> None:
    """As on a cluster: Helm 3 asks for no strict validation, and the API drops what it does not know."""
    misspelt = own_chart(tmp_path, "terminationGracePeriodSeconds: ", "terminationGracePeriodSecs: ")
    with released("3", tmp_path) as release:
        said = release.helm("upgrade", misspelt, *PATIENCE)
        assert 'unknown field "spec.template.spec.terminationGracePeriodSecs"' in said
        assert "terminationGracePeriodSecs" not in release.api.one("Deployment")["spec"]["template"]["spec"]
