"""Values that the chart refuses, and that values, schema, table and program agree."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm.values_schema import values_schema
from helm.values_table import chart_values
from tests.helm.chart_values import nested
from tests.helm.manifests import Json, RefusedValues, render
from tests.helm.tools import CHART

OPTIONAL = {"resources": {"claims", "limits", "requests"}}
OPTIONAL |= {key: {"initialDelaySeconds"} for key in ("startupProbe", "livenessProbe", "readinessProbe")}
"""Keys that the schema takes and values.yaml does not have, by the last part of the name that they are under."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("helm")


REFUSED = [
    ({"model": {"source": "path"}}, "needs the absolute path of a directory or a .gguf file"),
    ({"model": {"path": "/x"}}, "model.path is set, but model.source is demo"),
    ({"model": {"source": "pvc"}}, "needs model.pvc.existingClaim, or model.pvc.create"),
    ({"model": {"source": "download"}}, "needs model.download.repository"),
    ({"model": {"source": "image"}}, "needs model.image.reference"),
    ({"model": {"pvc": {"create": True, "existingClaim": "a"}}}, "set one of them"),
    (
        {"replicaCount": 2, "model": {"source": "pvc", "pvc": {"create": True}}},
        "there can be several pods: it needs ReadWriteMany",
    ),
    ({"tls": {"clientAuth": True}}, "need tls.secretName"),
    ({"auth": {"tokensSecret": "a"}}, "would send tokens in plaintext"),
    (
        {"gateway": {"enabled": True}, "auth": {"tokensSecret": "a", "allowPlaintext": True}},
        "gateway.enabled with auth.tokensSecret needs gateway.tenant",
    ),
    (
        {"gateway": {"enabled": True, "tenant": "web"}},
        'gateway.tenant is "web", one of auth.tokensSecret, which is not',
    ),
    (
        {"gateway": {"enabled": True}, "networkPolicy": {"enabled": False}},
        "would let anybody to port 50054 of the pods",
    ),
    ({"autoscaling": {"enabled": True, "kind": "keda"}}, "needs autoscaling.keda.serverAddress"),
    ({"autoscaling": {"enabled": True, "minReplicas": 5}}, "minReplicas is 5, more than maxReplicas, which is 4"),
    ({"autoscaling": {"enabled": True, "minReplicas": 0}}, "a HorizontalPodAutoscaler does not take"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_values_that_do_not_go_together_are_refused(home: Path, given: Json, sentence: str) -> None:
    with pytest.raises(RefusedValues) as caught:
        render(home, given)
    assert sentence in str(caught.value)


WRONG = [
    ("replicas", 2),
    ("runner.settings.kvCacheMemroy", "8GiB"),
    ("runner.settings.model", "/x"),
    ("runner.settings.kvDtype", "fp4"),
    ("runner.settings.cudaGraphs", "yes"),
    ("kvManager.settings.blockSize", 16),
    ("image.runner.digest", "sha256:abc"),
    ("model.source", "hub"),
    ("model.download.repository", "https://hub.example/org/name"),
    ("termination.lameDuckSeconds", -1),
    ("runner.env", {"A": ["list"]}),
    ("monitoring.podMonitor.interval", "15secs"),
    ("podDisruptionBudget.maxUnavailable", "half"),
    ("gateway.policy", "fair"),
    ("gateway.tenant", "a web"),
    ("runner.settings.vllmAddress", "0.0.0.0:50054"),
]


@pytest.mark.parametrize("version", ["3", "4"])
@pytest.mark.parametrize(("path", "value"), WRONG, ids=[path for path, _ in WRONG])
def test_the_schema_refuses_what_it_does_not_know(home: Path, path: str, value: Any, version: Any) -> None:
    with pytest.raises(RefusedValues) as caught:
        render(home, nested(path, value), version=version)
    message = str(caught.value)
    assert "values don't meet the specifications of the schema" in message
    assert path.split(".")[-1] in message or path.split(".")[-2] in message


def test_the_schema_has_the_keys_of_the_values_and_no_others() -> None:
    schema = values_schema()
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    extra = schema["properties"].pop("global")
    assert "additionalProperties" not in extra
    assert list(_differences(defaults, schema, schema["definitions"], "")) == []


def _differences(value: Any, schema: Json, definitions: Json, path: str) -> Any:
    """Keys that only one of the two has; and objects that are open, but for free maps."""
    schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if not isinstance(value, dict) or "properties" not in schema:
        return
    if schema.get("additionalProperties") is not False:
        yield f"{path} is open"
    known = schema["properties"]
    optional = {"settings": known.keys(), "resources": {"claims", "limits", "requests"}}.get(
        path.rpartition(".")[2], set()
    )
    if path.endswith("Probe"):
        optional = {"initialDelaySeconds"}
    yield from (f"{path}.{key}" for key in (value.keys() ^ known.keys()) - set(optional))
    for key in value.keys() & known.keys():
        yield from _differences(value[key], known[key], definitions, f"{path}.{key}".lstrip("."))


def test_every_value_has_its_sentence() -> None:
    listed = chart_values()
    assert len({value.name for value in listed}) == len(listed) > 100
    assert all(value.text.endswith(".") for value in listed)


def test_chart_and_program_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert chart["appVersion"] == project["version"]
