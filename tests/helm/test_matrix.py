"""The chart under many values, for three Kubernetes versions: schemas, pod security, and whether all fits together."""

from __future__ import annotations

import pytest

from tests.helm.cases import CASES, matrix, rendered
from tests.helm.checks_gateway import GATEWAY_CHECKS
from tests.helm.checks_network import NETWORK_CHECKS
from tests.helm.checks_program import PROGRAM_CHECKS
from tests.helm.checks_references import REFERENCE_CHECKS, missing_references
from tests.helm.custom_resources import custom_faults
from tests.helm.manifests import Manifests
from tests.helm.pod_security import restricted_faults
from tests.helm.schemas import has_schema, strict_faults

CROSS_CHECKS = (*NETWORK_CHECKS, *PROGRAM_CHECKS, *REFERENCE_CHECKS, *GATEWAY_CHECKS)


def schema_faults(manifests: Manifests, kubernetes: str) -> list[str]:
    """What the strict schemas, ours for custom resources, have against any object."""
    return [
        f"{item['kind']} {item['metadata']['name']}: {fault}"
        for item in manifests.objects
        for fault in (strict_faults(item, kubernetes) if has_schema(item, kubernetes) else custom_faults(item))
    ]


@pytest.mark.parametrize(("name", "kubernetes"), matrix())
def test_schemas(name: str, kubernetes: str) -> None:
    assert schema_faults(rendered(name, kubernetes), kubernetes) == []


@pytest.mark.parametrize(("name", "kubernetes"), matrix())
def test_every_pod_is_restricted(name: str, kubernetes: str) -> None:
    pods = rendered(name, kubernetes).pods
    assert [f"{pod.name}: {fault}" for pod in pods for fault in restricted_faults(pod, kubernetes)] == []
    assert pods


@pytest.mark.parametrize(("name", "kubernetes"), matrix())
def test_all_fits_together(name: str, kubernetes: str) -> None:
    manifests = rendered(name, kubernetes)
    assert [fault for check in CROSS_CHECKS for fault in check(manifests)] == []
    assert list(missing_references(manifests, CASES[name].outside)) == []
    assert len(manifests.octavo_pods) == 1


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for_is_there_and_nothing_else(name: str) -> None:
    kinds = {item["kind"] for item in rendered(name).objects}
    assert set(CASES[name].has.split()) <= kinds
    assert not set(CASES[name].lacks.split()) & kinds
