"""Helm's own view of the chart, 3 and 4: lint, package, the same objects from both, and the values that it refuses."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.cases import ALL_ON, APIS, CASES, TLS_AND_AUTH
from tests.helm.manifests import RefusedValues, render
from tests.helm.tools import CHART, HELM_VERSIONS, HelmVersion, helm

Json = dict[str, Any]
both = pytest.mark.parametrize("version", HELM_VERSIONS)


@both
@pytest.mark.parametrize("name", ["default", "all on", "cpu", "gpu", "gateway"])
def test_lint_finds_nothing(version: HelmVersion, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(case.values))
    files = [part for file in (*(CHART / each for each in case.files), values) for part in ("--values", file)]
    done = helm("lint", "--strict", CHART, "--kube-version", "1.33.0", *files, version=version, home=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout + done.stderr


@both
def test_the_package_has_what_an_installation_needs_and_no_more(version: HelmVersion, tmp_path: Path) -> None:
    done = helm("package", CHART, "--destination", tmp_path, version=version, home=tmp_path)
    assert done.returncode == 0, done.stderr
    [archive] = tmp_path.glob("octavo-*.tgz")
    with tarfile.open(archive) as package:
        names = {name.removeprefix("octavo/") for name in package.getnames()}
    shipped = {str(path.relative_to(CHART)) for path in CHART.rglob("*") if path.is_file()}
    assert {"Chart.yaml", "values.yaml", "values.schema.json", "values-gpu.yaml", "README.md"} <= names
    assert names == shipped


@pytest.mark.parametrize("name", ["default", "all on", "gateway with tls and tokens", "keda"])
def test_both_versions_render_the_same_objects(name: str, tmp_path: Path) -> None:
    three, four = (render(tmp_path, CASES[name].values, apis=APIS, version=version) for version in HELM_VERSIONS)
    assert list(three.objects) == list(four.objects)


def nested(path: str, value: object) -> Json:
    """nested('a.b', 1) is {'a': {'b': 1}}."""
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


REFUSED: list[tuple[Json, str]] = [
    ({"oops": 1}, "oops"),
    ({"runner": {"setings": {}}}, "setings"),
    ({"runner": {"settings": {"kvCacheMemroy": "1GiB"}}}, "kvCacheMemroy"),
    ({"runner": {"settings": {"kvAddress": "unix:/tmp/kv.sock"}}}, "kvAddress"),
    ({"replicaCount": "three"}, "replicaCount"),
    ({"model": {"source": "s3"}}, "source"),
    ({"runner": {"settings": {"weightsDtype": "int3"}}}, "weightsDtype"),
    ({"tls": {"clientAuth": "yes"}}, "clientAuth"),
    ({"termination": {"gracePeriodSeconds": 30}}, "termination.gracePeriodSeconds is 30"),
    ({"termination": {"gracePeriodSeconds": 140}}, "termination.gracePeriodSeconds is 140"),
    ({"model": {"source": "pvc"}}, "model.source=pvc needs model.pvc.existingClaim"),
    ({"model": {"source": "path", "path": "models/a"}}, "absolute path"),
    ({"model": {"source": "download"}}, "model.source=download needs model.download.repository"),
    ({"model": {"source": "image"}}, "model.source=image needs model.image.reference"),
    ({"auth": {"tokensSecret": "t"}}, "would send tokens in plaintext"),
    ({"tls": {"clientAuth": True}}, "need tls.secretName"),
    ({"autoscaling": {"enabled": True, "kind": "keda"}}, "autoscaling.keda.serverAddress"),
    ({"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 2}}, "more than maxReplicas"),
    ({"model": {"source": "pvc", "pvc": {"create": True}}, "replicaCount": 2}, "ReadWriteMany"),
    ({"gateway": {"enabled": True}} | TLS_AND_AUTH, "gateway.enabled with auth.tokensSecret needs gateway.tenant"),
]


@both
@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_values_that_cannot_be_are_refused_with_a_sentence(
    version: HelmVersion, values: Json, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RefusedValues) as caught:
        render(tmp_path, values, version=version)
    assert sentence in str(caught.value)


@both
def test_a_grace_period_just_long_enough_is_taken(version: HelmVersion, tmp_path: Path) -> None:
    # Lame duck 5, drain 120, grace 10 and the KV manager's 5 are 140 by default.
    [pod] = render(tmp_path, nested("termination.gracePeriodSeconds", 141), version=version).octavo_pods
    assert pod.spec["terminationGracePeriodSeconds"] == 141


@both
@pytest.mark.parametrize(
    ("kubernetes", "values", "sentence"),
    [
        ("1.28", {}, "kubeVersion: >=1.29.0-0"),
        (
            "1.29",
            CASES["model in an image"].values,
            "model.source=image needs Kubernetes 1.33 or newer, this is v1.29.0",
        ),
        (
            "1.32",
            CASES["model in an image"].values,
            "model.source=image needs Kubernetes 1.33 or newer, this is v1.32.0",
        ),
    ],
)
def test_a_cluster_that_is_too_old_is_told_so(
    version: HelmVersion, kubernetes: str, values: Json, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(RefusedValues) as caught:
        render(tmp_path, values, kubernetes=kubernetes, version=version)
    assert sentence in str(caught.value)


def test_custom_resources_come_by_themselves_where_the_cluster_has_their_kinds(tmp_path: Path) -> None:
    without = {item["kind"] for item in render(tmp_path).objects}
    by_force = {item["kind"] for item in render(tmp_path, nested("monitoring.podMonitor.enabled", True)).objects}
    switched_off = nested("monitoring.podMonitor.enabled", False)
    assert "PodMonitor" not in without
    assert "PodMonitor" in by_force
    assert "PodMonitor" in {item["kind"] for item in render(tmp_path, apis=APIS).objects}
    assert "PodMonitor" not in {item["kind"] for item in render(tmp_path, switched_off, apis=APIS).objects}


def test_an_unknown_key_is_refused_on_every_level() -> None:
    """By the schema itself, because helm would need a minute for all of them."""
    validator = schema()
    for path in levels(yaml.safe_load((CHART / "values.yaml").read_text())):
        wrong = nested(f"{path}.oops", 1) if path else {"oops": 1}
        assert [error for error in validator.iter_errors(wrong) if "oops" in error.message], path


FREE = {
    *(
        "commonLabels",
        "podAnnotations",
        "podLabels",
        "nodeSelector",
        "affinity",
        "labels",
        "annotations",
        "env",
        "settings",
    ),
    *("requests", "limits", "dataSourceRef", "drop", "seccompProfile", "capabilities"),
    *(
        "podSecurityContext",
        "containerSecurityContext",
        "strategy",
        "behavior",
        "rollingUpdate",
        "scaleUp",
        "scaleDown",
    ),
}
"""Maps whose keys are the user's, or Kubernetes' own, which its schemas check."""


def levels(values: Json, path: str = "") -> list[str]:
    """The paths of all maps of the values, but of free ones."""
    found = [path]
    for name, value in values.items():
        if isinstance(value, dict) and name not in FREE:
            found += levels(value, f"{path}.{name}" if path else name)
    return found


def test_settings_refuse_what_the_programs_do_not_know() -> None:
    for service in ("runner", "kvManager"):
        wrong = nested(f"{service}.settings.oops", 1)
        assert [error for error in schema().iter_errors(wrong) if "oops" in error.message]


def test_a_wrong_type_is_refused_on_every_leaf() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    validator = schema()
    assert list(validator.iter_errors(values)) == []
    assert list(validator.iter_errors(ALL_ON)) == []
    for path in leaves(values):
        for wrong in (nested(path, {"a": {"list": ["of"]}}), nested(path, None)):
            assert list(validator.iter_errors(wrong)), (path, wrong)


def leaves(values: Json, path: str = "") -> list[str]:
    """The paths of all values that are no maps."""
    found = []
    for name, value in values.items():
        where = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            found += leaves(value, where) if name not in FREE else []
        else:
            found.append(where)
    return found


def schema() -> Any:
    from jsonschema.validators import validator_for

    content = yaml.safe_load((CHART / "values.schema.json").read_text())
    return validator_for(content)(content)
