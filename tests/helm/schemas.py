"""What a Kubernetes version says of an object, by the JSON schemas that the package kubernetes-validate bundles.

The package reads its schemas anew for each object and tells the first fault; here they are read once, and all faults
are told.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tests.required import require_module

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that a schema refuses: where, why, and which of the fields there are unknown."""

    path: tuple[str | int, ...]
    message: str
    unknown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))}: {self.message}"


def has_schema(item: Json, kubernetes: str) -> bool:
    """Whether the Kubernetes version knows the kind; custom resources it does not."""
    return _validator(item["kind"], item["apiVersion"], kubernetes) is not None


def strict_faults(item: Json, kubernetes: str) -> list[Fault]:
    """What is wrong with an object in the eyes of a Kubernetes version ('1.33'), unknown fields included.

    Raises LookupError for a kind that the version does not know.
    """
    validator = _validator(item["kind"], item["apiVersion"], kubernetes)
    if validator is None:
        raise LookupError(f"Kubernetes {kubernetes} has no {item['kind']} in {item['apiVersion']}.")
    errors = sorted(validator.iter_errors(item), key=lambda error: list(map(str, error.absolute_path)))
    return [Fault(tuple(error.absolute_path), error.message, _unknown(error)) for error in errors]


def _unknown(error: Any) -> tuple[str, ...]:
    if error.validator != "additionalProperties":
        return ()
    return tuple(name for name in error.instance if name not in error.schema.get("properties", {}))


@cache
def _validator(kind: str, api_version: str, kubernetes: str) -> Any:
    from jsonschema.validators import Draft202012Validator
    from referencing import Registry, Resource

    # As the package names its files: rbac.authorization.k8s.io/v1 is rbac-v1.
    name = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _read(kubernetes, f"{kind.lower()}-{name}.json")
    if schema is None:
        return None
    known = Registry().with_resource("", Resource.from_contents(schema))
    return Draft202012Validator(schema, registry=Resource.from_contents(_definitions(kubernetes)) @ known)


@cache
def _definitions(kubernetes: str) -> Any:
    return _read(kubernetes, "_definitions.json")


def _read(kubernetes: str, name: str) -> Any:
    require_module("kubernetes_validate", "`make test` brings it")
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{kubernetes}.0-local-strict"
    assert folder.is_dir(), f"kubernetes-validate has no schemas of Kubernetes {kubernetes}."
    path = folder / name
    return json.loads(path.read_text()) if path.is_file() else None
