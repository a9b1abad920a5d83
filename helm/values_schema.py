"""The schema of the chart's values: `python -m helm.values_schema` writes values.schema.json. Unknown keys are refused.

It is draft 7, which is the newest that Helm 3 knows.
"""

from __future__ import annotations

import json
import sys

from helm.generated import CHART, write_or_check
from helm.schema_parts import (
    ANY_OBJECT,
    NOT_EMPTY,
    NUMBER_OR_SHARE,
    SWITCH,
    TEXT,
    URL,
    Schema,
    definitions,
    group,
    list_of,
    one_of,
    shared,
    whole,
)


def values_schema() -> Schema:
    """The schema, as an object of JSON."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart octavo",
        **group(
            {
                **_objects_and_images(),
                **_services(),
                **_pods(),
                **_around(),
                "gateway": _gateway(),
                "test": group({"enabled": SWITCH, "timeoutSeconds": whole(1)}),
            }
        ),
        "definitions": definitions(),
    }


def schema_text() -> str:
    """The text of values.schema.json."""
    return json.dumps(values_schema(), indent=2) + "\n"


def main() -> int:
    return write_or_check(CHART / "values.schema.json", schema_text(), "python -m helm.values_schema")


def _objects_and_images() -> dict[str, Schema]:
    return {
        "global": {
            "type": "object",
            "description": "What a parent chart hands to its parts; not read here.",
        },
        "nameOverride": shared("name"),
        "fullnameOverride": shared("name"),
        "commonLabels": shared("strings"),
        "replicaCount": whole(),
        "image": group(
            {
                "registry": TEXT,
                "pullSecrets": shared("names"),
                "runner": shared("image"),
                "kvManager": shared("image"),
            }
        ),
        "model": _model(),
    }


def _model() -> Schema:
    modes = one_of("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")
    claim = {
        "existingClaim": shared("name"),
        "create": SWITCH,
        "size": shared("quantity"),
        "storageClassName": TEXT,
        "accessModes": list_of(modes) | {"minItems": 1},
        "annotations": shared("strings"),
        "dataSourceRef": ANY_OBJECT,
    }
    download = {
        "repository": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)?$"},
        "revision": NOT_EMPTY,
        "include": shared("names"),
        "exclude": shared("names"),
        "token": group({"secretName": shared("name"), "key": NOT_EMPTY}),
        "endpoint": URL,
        "sizeLimit": shared("quantity"),
        "env": shared("env"),
        "resources": shared("resources"),
    }
    return group(
        {
            "source": one_of("demo", "path", "pvc", "download", "image"),
            "name": TEXT,
            "path": TEXT,
            "pvc": group(claim),
            "download": group(download),
            "image": group({"reference": TEXT, "pullPolicy": shared("pullPolicy")}),
        }
    )


def _services() -> dict[str, Schema]:
    both = {
        "args": list_of(TEXT),
        "env": shared("env"),
        "envFrom": shared("objects"),
        "resources": shared("resources"),
        "livenessProbe": shared("probe"),
        "readinessProbe": shared("probe"),
        "volumeMounts": shared("objects"),
    }
    runner = {
        "settings": shared("runnerSettings"),
        "startupSeconds": whole(1),
        "startupProbe": shared("startup"),
        "shm": group({"enabled": SWITCH, "sizeLimit": shared("quantity")}),
        "cache": group({"sizeLimit": shared("quantity")}),
        "tmpSizeLimit": shared("quantity"),
        "volumes": shared("objects"),
    }
    return {
        "runner": group(both | runner),
        "kvManager": group(both | {"settings": shared("kvManagerSettings"), "startupProbe": shared("probe")}),
        "termination": group(
            {
                "lameDuckSeconds": whole(0, 3600),
                "drainSeconds": whole(0, 86400),
                "graceSeconds": whole(0, 3600),
                "kvGraceSeconds": whole(0, 3600),
                "gracePeriodSeconds": whole(),
            }
        ),
    }


def _pods() -> dict[str, Schema]:
    steps = {"type": ["integer", "string"]}
    rolling = group({"maxSurge": steps, "maxUnavailable": steps}) | {"type": ["object", "null"]}
    return {
        "strategy": group({"type": one_of("RollingUpdate", "Recreate"), "rollingUpdate": rolling}),
        "revisionHistoryLimit": whole(),
        "progressDeadlineSeconds": whole(),
        "serviceAccount": group({"create": SWITCH, "name": shared("name"), "annotations": shared("strings")}),
        "podSecurityContext": ANY_OBJECT,
        "containerSecurityContext": ANY_OBJECT,
        "podAnnotations": shared("strings"),
        "podLabels": shared("strings"),
        "priorityClassName": shared("name"),
        "runtimeClassName": shared("name"),
        "schedulerName": TEXT,
        "nodeSelector": shared("strings"),
        "tolerations": shared("objects"),
        "affinity": ANY_OBJECT,
        "topologySpreadConstraints": shared("objects"),
        "podDisruptionBudget": group({"enabled": SWITCH, "maxUnavailable": NUMBER_OR_SHARE}),
    }


def _around() -> dict[str, Schema]:
    """What is around the pods: their Services, who may call, who looks, who scales."""
    secret_key = NOT_EMPTY
    test_token = {"tokenSecret": shared("name"), "tokenKey": secret_key}
    auth = {
        "tokensSecret": shared("name"),
        "tokensKey": secret_key,
        "allowPlaintext": SWITCH,
        "test": group(test_token),
    }
    policy = {name: shared("objects") for name in ("clients", "monitoring", "extraIngress", "extraEgress")}
    return {
        "bindAddress": one_of("0.0.0.0", "::"),
        "service": group(_service() | {"headless": SWITCH}),
        "tls": group({"secretName": shared("name"), "clientAuth": SWITCH, "clientSecretName": shared("name")}),
        "auth": group(auth),
        "networkPolicy": group({"enabled": SWITCH} | policy),
        "autoscaling": _autoscaling(),
        "monitoring": _monitoring(),
    }


def _service() -> dict[str, Schema]:
    return {"type": shared("serviceType"), "port": shared("port"), "annotations": shared("strings")}


def _autoscaling() -> Schema:
    keda = {
        "serverAddress": URL,
        "authenticationRef": shared("name"),
        "pollingInterval": whole(1),
        "triggers": shared("objects"),
    }
    return group(
        {
            "enabled": SWITCH,
            "kind": one_of("hpa", "keda"),
            "minReplicas": whole(),
            "maxReplicas": whole(1),
            "waitingRequests": {"type": "number", "exclusiveMinimum": 0},
            "heldRatio": {"type": "number", "minimum": 0, "maximum": 1},
            "metrics": shared("objects"),
            "behavior": ANY_OBJECT,
            "keda": group(keda),
        }
    )


def _monitoring() -> Schema:
    labelled = {"enabled": shared("auto"), "labels": shared("strings")}
    duration = {"type": "string", "pattern": "^([0-9]+(ms|[smh]))?$"}
    return group(
        {
            "podMonitor": group(labelled | {"interval": duration, "metricRelabelings": shared("objects")}),
            "prometheusRule": group(labelled | {"runbookUrl": NOT_EMPTY}),
            "dashboards": group(labelled | {"annotations": shared("strings")}),
        }
    )


_POLICIES = (
    "cache_aware",
    "random",
    "round_robin",
    "power_of_two",
    "least_load",
    "consistent_hashing",
    "prefix_hash",
)


def _gateway() -> Schema:
    return group(
        {
            "enabled": SWITCH,
            "image": shared("image"),
            "replicaCount": whole(),
            "policy": one_of(*_POLICIES),
            "overloadUsage": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            "healthCheckSeconds": whole(1),
            "graceSeconds": whole(),
            "apiKeySecret": shared("name"),
            "apiKeyKey": NOT_EMPTY,
            # As in the file of tokens.
            "tenant": {"type": "string", "pattern": r"^([A-Za-z0-9][A-Za-z0-9._:@-]{0,62})?$"},
            "allowOpenDoor": SWITCH,
            "args": list_of(TEXT),
            "env": shared("env"),
            "resources": shared("resources"),
            "service": group(_service()),
            "clients": shared("objects"),
            "podAnnotations": shared("strings"),
            "podLabels": shared("strings"),
            "nodeSelector": shared("strings"),
            "tolerations": shared("objects"),
            "affinity": ANY_OBJECT,
        }
    )


if __name__ == "__main__":
    sys.exit(main())
