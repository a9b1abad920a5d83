"""The words of the chart's schema: small schemas, and those that several values share."""

from __future__ import annotations

from typing import Any

from helm.settings_schema import kv_manager_settings, runner_settings

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NOT_EMPTY: Schema = {"type": "string", "minLength": 1}
SWITCH: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
URL: Schema = {"type": "string", "pattern": "^(https?://.*)?$"}
NUMBER_OR_SHARE: Schema = {"type": ["integer", "string"], "pattern": "^[0-9]+%$", "minimum": 0}


def group(properties: dict[str, Schema]) -> Schema:
    """An object that has these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def list_of(items: Schema) -> Schema:
    """A list of such."""
    return {"type": "array", "items": items}


def whole(least: int = 0, most: int | None = None) -> Schema:
    """A whole number within bounds."""
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def one_of(*choices: str | bool) -> Schema:
    """One of a few values."""
    return {"enum": list(choices)}


def shared(name: str) -> Schema:
    """One of `definitions`."""
    return {"$ref": f"#/definitions/{name}"}


def definitions() -> dict[str, Schema]:
    """What several values share, by name."""
    variable = {"anyOf": [{"type": ["string", "number", "boolean"]}, group({"valueFrom": ANY_OBJECT})]}
    timing = {"initialDelaySeconds": whole(), "periodSeconds": whole(1), "timeoutSeconds": whole(1)}
    return {
        "strings": {"type": "object", "additionalProperties": TEXT},
        "name": {"type": "string", "maxLength": 253, "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"},
        "names": list_of(NOT_EMPTY),
        "objects": list_of(ANY_OBJECT),
        "quantity": {
            "type": ["string", "integer"],
            "pattern": "^[0-9]+([.][0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$",
            "minimum": 0,
        },
        "pullPolicy": one_of("Always", "IfNotPresent", "Never"),
        "serviceType": one_of("ClusterIP", "NodePort", "LoadBalancer"),
        "port": whole(1, 65535),
        "auto": one_of(True, False, "auto"),
        "env": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": variable,
        },
        "image": group(
            {
                "repository": NOT_EMPTY,
                "tag": {"type": "string", "pattern": "^([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?$"},
                "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
                "pullPolicy": shared("pullPolicy"),
            }
        ),
        "resources": group({"requests": ANY_OBJECT, "limits": ANY_OBJECT, "claims": shared("objects")}),
        "startup": group(timing),
        "probe": group(timing | {"failureThreshold": whole(1)}),
        "runnerSettings": runner_settings(),
        "kvManagerSettings": kv_manager_settings(),
    }
