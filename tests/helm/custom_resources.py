"""Schemas of the custom resources that the chart makes, by hand from the documentation of their CRDs.

They have the fields that charts use and refuse all others, which a cluster would drop in silence.
https://prometheus-operator.dev/docs/api-reference/api/ and https://keda.sh/docs/latest/reference/scaledobject-spec/
"""

from __future__ import annotations

from typing import Any

from jsonschema.validators import Draft202012Validator

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
NAME: Json = {"type": "string", "minLength": 1}
NUMBER: Json = {"type": "integer", "minimum": 0}
FLAG: Json = {"type": "boolean"}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
# As Prometheus reads durations: at least one part, from the largest unit to the smallest.
DURATION: Json = {
    "type": "string",
    "pattern": r"^(0|(?=.)([0-9]+y)?([0-9]+w)?([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?([0-9]+ms)?)$",
}


def closed(required: tuple[str, ...] = (), **properties: Json) -> Json:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def some(items: Json) -> Json:
    """A list with at least one element."""
    return {"type": "array", "items": items, "minItems": 1}


LABEL_SELECTOR = closed(
    matchLabels=TEXTS,
    matchExpressions=some(closed(("key", "operator"), key=NAME, operator=NAME, values=some(TEXT))),
)
RELABELING = closed(
    sourceLabels=some(TEXT),
    separator=TEXT,
    targetLabel=TEXT,
    regex=TEXT,
    modulus=NUMBER,
    replacement=TEXT,
    action={
        "enum": [
            *("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop"),
            *("labelkeep", "lowercase", "uppercase", "keepequal", "dropequal"),
        ]
    },
)
POD_MONITOR = closed(
    ("selector", "podMetricsEndpoints"),
    selector=LABEL_SELECTOR,
    podMetricsEndpoints=some(
        closed(
            port=NAME,
            portNumber=NUMBER,
            path=TEXT,
            scheme={"enum": ["http", "https"]},
            interval=DURATION,
            scrapeTimeout=DURATION,
            honorLabels=FLAG,
            honorTimestamps=FLAG,
            relabelings=some(RELABELING),
            metricRelabelings=some(RELABELING),
        )
    ),
    namespaceSelector=closed(any=FLAG, matchNames=some(NAME)),
    jobLabel=NAME,
    podTargetLabels=some(NAME),
    sampleLimit=NUMBER,
    attachMetadata=closed(node=FLAG),
)
RULE = closed(
    ("expr",),
    alert=NAME,
    record={"type": "string", "pattern": "^[a-zA-Z_:][a-zA-Z0-9_:]*$"},
    expr={"type": ["string", "integer"], "minLength": 1},
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": DURATION, "keep_firing_for": DURATION},
) | {"oneOf": [{"required": ["alert"]}, {"required": ["record"], "not": {"required": ["for"]}}]}
PROMETHEUS_RULE = closed(
    ("groups",),
    groups=some(closed(("name", "rules"), name=NAME, interval=DURATION, rules=some(RULE), limit=NUMBER, labels=TEXTS)),
)
TRIGGER = closed(
    ("type", "metadata"),
    type=NAME,
    name=TEXT,
    metadata=TEXTS,
    useCachedMetrics=FLAG,
    authenticationRef=closed(
        ("name",), name=NAME, kind={"enum": ["TriggerAuthentication", "ClusterTriggerAuthentication"]}
    ),
    metricType={"enum": ["AverageValue", "Value", "Utilization"]},
)
PROMETHEUS_TRIGGER: Json = {
    "if": {"properties": {"type": {"const": "prometheus"}}},
    "then": {"properties": {"metadata": {"required": ["serverAddress", "query", "threshold"]}}},
}
SCALED_OBJECT = closed(
    ("scaleTargetRef", "triggers"),
    scaleTargetRef=closed(("name",), apiVersion=NAME, kind=NAME, name=NAME, envSourceContainerName=NAME),
    pollingInterval=NUMBER,
    cooldownPeriod=NUMBER,
    initialCooldownPeriod=NUMBER,
    idleReplicaCount=NUMBER,
    minReplicaCount=NUMBER,
    maxReplicaCount=NUMBER,
    fallback=closed(("failureThreshold", "replicas"), failureThreshold=NUMBER, replicas=NUMBER, behavior=TEXT),
    advanced=closed(
        restoreToOriginalReplicaCount=FLAG,
        horizontalPodAutoscalerConfig=closed(name=NAME, behavior={"type": "object"}),
    ),
    triggers=some(TRIGGER | PROMETHEUS_TRIGGER),
)


def _resource(api_version: str, kind: str, spec: Json) -> Draft202012Validator:
    whole = closed(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=closed(("name",), name=NAME, namespace=NAME, labels=TEXTS, annotations=TEXTS),
        spec=spec,
    )
    return Draft202012Validator(whole)


CUSTOM_RESOURCES = {
    "PodMonitor": _resource("monitoring.coreos.com/v1", "PodMonitor", POD_MONITOR),
    "PrometheusRule": _resource("monitoring.coreos.com/v1", "PrometheusRule", PROMETHEUS_RULE),
    "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
}


def custom_faults(item: Json) -> list[str]:
    """'PATH: WHAT' for all that is wrong with a custom resource. KeyError for a kind that has no schema here."""
    errors = CUSTOM_RESOURCES[item["kind"]].iter_errors(item)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors)
