"""JSON schema of the settings that a service takes, by the names that the chart's values have for them."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from services.config import KvManagerSettings, ModelRunnerSettings, OctavoSettings

# What the chart says itself, from values of its own.
_OF_BOTH = {"config", "kv_address", "tls_cert", "tls_key", "tls_client_ca", "log_format", "grace_seconds"}
_OF_RUNNER = {
    "model",
    "model_name",
    "tls_ca",
    "auth_tokens",
    "allow_plaintext_tokens",
    "runner_address",
    "runner_metrics_address",
    "runner_health_address",
    "runner_admin_address",
    "vllm_address",
    "vllm_tenant",
}
_OF_KV_MANAGER = {"kv_metrics_address", "kv_health_address"}


def runner_settings() -> dict[str, Any]:
    """Schema of `runner.settings`."""
    return _schema(ModelRunnerSettings, _OF_BOTH | _OF_RUNNER)


def kv_manager_settings() -> dict[str, Any]:
    """Schema of `kvManager.settings`."""
    return _schema(KvManagerSettings, _OF_BOTH | _OF_KV_MANAGER)


def _schema(settings: type[OctavoSettings], taken: set[str]) -> dict[str, Any]:
    unknown = taken - settings.model_fields.keys()
    if unknown:
        raise LookupError(f"{settings.__name__} has no {sorted(unknown)}.")
    fields = {name: field for name, field in settings.model_fields.items() if name not in taken}
    properties = {_camel(name): _property(field) for name, field in sorted(fields.items())}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(part.capitalize() for part in others)


def _property(field: FieldInfo) -> dict[str, Any]:
    return {"description": field.description or "", **_type(field.annotation)}


def _type(annotation: Any) -> dict[str, Any]:
    """Booleans and choices are checked by the schema; the program reads numbers with units and refuses wrong ones."""
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _type(next(part for part in get_args(annotation) if part is not type(None)))
    if annotation is bool:
        return {"type": "boolean"}
    if get_origin(annotation) is Literal:
        return {"enum": list(get_args(annotation))}
    return {"type": ["string", "number"]}
