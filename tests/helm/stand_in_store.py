"""The stand-in API's objects in memory: kept, selected, watched, and given the status that controllers would give."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from tests.helm.stand_in_resources import BUILT_IN, Resource

Json = dict[str, Any]
Event = tuple[str, Json]
REPLICA_SETS = next(each for each in BUILT_IN if each.kind == "ReplicaSet")


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects of a kind: in a namespace (None: in all), with labels and fields as a query says."""

    resource: Resource
    namespace: str | None = None
    labels: str = ""
    fields: str = ""

    def has(self, resource: Resource, item: Json) -> bool:
        metadata = item["metadata"]
        if resource != self.resource or (self.namespace and metadata.get("namespace") != self.namespace):
            return False
        labels = metadata.get("labels") or {}
        facts = {"metadata.name": metadata["name"], "metadata.namespace": metadata.get("namespace", "")}
        return all(_holds(term, labels) for term in _terms(self.labels)) and all(
            _holds(term, facts) for term in _terms(self.fields)
        )


def _terms(selector: str) -> list[str]:
    return [term for term in selector.split(",") if term]


def _holds(term: str, facts: dict[str, str]) -> bool:
    """One of a=b, a==b, a!=b, a and !a."""
    if "!=" in term:
        name, value = term.split("!=")
        return facts.get(name) != value
    if "=" in term:
        name, value = term.replace("==", "=").split("=")
        return facts.get(name) == value
    return (term[1:] not in facts) if term.startswith("!") else (term in facts)


@dataclass(slots=True, eq=False)
class Watch:
    """Somebody who wants to know what happens to a selection."""

    selection: Selection
    events: queue.Queue[Event] = field(default_factory=queue.Queue)


class Store:
    """All objects, behind one lock."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 100
        self._items: dict[tuple[Resource, str | None, str], Json] = {}
        self._applied: dict[tuple[Resource, str | None, str], Json] = {}
        self._watches: list[Watch] = []
        self._told: list[tuple[int, Resource, Event]] = []
        """All that has happened, by version."""

    def get(self, resource: Resource, namespace: str | None, name: str) -> Json | None:
        with self.lock:
            return deepcopy(self._items.get((resource, namespace, name)))

    def select(self, selection: Selection) -> list[Json]:
        with self.lock:
            found = [item for (resource, _, _), item in self._items.items() if selection.has(resource, item)]
            return deepcopy(found)

    def all(self) -> list[Json]:
        """Every object."""
        with self.lock:
            return deepcopy(list(self._items.values()))

    def last_applied(self, resource: Resource, namespace: str | None, name: str) -> Json:
        """What was applied to an object the last time; {} when nothing was."""
        return self._applied.get((resource, namespace, name), {})

    def put(self, resource: Resource, namespace: str | None, item: Json, applied: Json | None = None) -> Json:
        """Keeps an object, new or changed, as its controller leaves it; returns that."""
        with self.lock:
            key = (resource, namespace, item["metadata"]["name"])
            before = self._items.get(key)
            self.version += 1
            kept = deepcopy(item) | {"kind": resource.kind, "apiVersion": resource.group_version}
            kept["metadata"] = _metadata(kept, before, namespace, self.version)
            settle(kept)
            self._items[key] = kept
            if applied is not None:
                self._applied[key] = deepcopy(applied)
            self._tell(resource, "MODIFIED" if before else "ADDED", kept)
            if resource.kind == "Deployment":
                self._roll_out(namespace, kept)
            return deepcopy(kept)

    def _roll_out(self, namespace: str | None, deployment: Json) -> None:
        """The ReplicaSet of the present template gets all replicas, those of former ones none."""
        current = replica_set(deployment)
        for item in self.select(Selection(REPLICA_SETS, namespace)):
            if (
                _owner(item) == deployment["metadata"]["uid"]
                and item["metadata"]["name"] != current["metadata"]["name"]
            ):
                self.put(REPLICA_SETS, namespace, item | {"spec": item["spec"] | {"replicas": 0}})
        self.put(REPLICA_SETS, namespace, current)

    def delete(self, resource: Resource, namespace: str | None, name: str) -> bool:
        """Removes an object and what it owns; False when there is none."""
        with self.lock:
            item = self._items.pop((resource, namespace, name), None)
            if item is None:
                return False
            self._applied.pop((resource, namespace, name), None)
            self.version += 1
            self._tell(resource, "DELETED", item)
            for owned in [key for key, each in self._items.items() if _owner(each) == item["metadata"]["uid"]]:
                self.delete(*owned)
            return True

    @contextmanager
    def watch(self, selection: Selection, after: int | None) -> Iterator[Watch]:
        """A watch that begins with what has happened after a version; None: with what there is already."""
        watch = Watch(selection)
        with self.lock:
            for item in self.select(selection) if after is None else []:
                watch.events.put(("ADDED", item))
            for version, resource, (kind, item) in self._told if after is not None else []:
                if version > after and selection.has(resource, item):
                    watch.events.put((kind, deepcopy(item)))
            self._watches.append(watch)
        try:
            yield watch
        finally:
            with self.lock:
                self._watches.remove(watch)

    def _tell(self, resource: Resource, kind: str, item: Json) -> None:
        self._told.append((self.version, resource, (kind, deepcopy(item))))
        for watch in self._watches:
            if watch.selection.has(resource, item):
                watch.events.put((kind, deepcopy(item)))


def _owner(item: Json) -> str | None:
    owners = item["metadata"].get("ownerReferences") or [{}]
    return owners[0].get("uid")


def _metadata(item: Json, before: Json | None, namespace: str | None, version: int) -> Json:
    old = before["metadata"] if before else {}
    changed = before is None or before.get("spec") != item.get("spec")
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return (
        item["metadata"]
        | ({"namespace": namespace} if namespace else {})
        | {
            "uid": old.get("uid", str(uuid.uuid4())),
            "creationTimestamp": old.get("creationTimestamp", made),
            "resourceVersion": str(version),
            "generation": old.get("generation", 0) + changed,
        }
    )


def settle(item: Json) -> None:
    """Gives an object the defaults and the status that a healthy cluster would give it in the end."""
    spec = item.get("spec") or {}
    generation = item["metadata"]["generation"]
    kind = item["kind"]
    if kind == "Deployment":
        count = spec.setdefault("replicas", 1)
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        conditions = [{"type": "Available", "status": "True"}]
        conditions += [{"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}]
        item["status"] = {"observedGeneration": generation, "conditions": conditions} | counts
    elif kind == "ReplicaSet":
        counts = dict.fromkeys(("replicas", "readyReplicas", "availableReplicas"), spec["replicas"])
        item["status"] = {"observedGeneration": generation} | counts
    elif kind == "Pod" and "podIP" not in (item.get("status") or {}):
        # One that has an address is run by somebody, who says how it is.
        ready = {"type": "Ready", "status": "False", "reason": "PodCompleted"}
        item["status"] = {"phase": "Succeeded", "conditions": [ready], "containerStatuses": []}
    elif kind == "Job":
        complete = [{"type": "Complete", "status": "True"}]
        item["status"] = {"succeeded": spec.get("completions", 1), "conditions": complete}
    elif kind == "PersistentVolumeClaim":
        item["status"] = {"phase": "Bound"}
    elif kind == "Service" and spec.get("type") != "ExternalName":
        spec.setdefault("clusterIP", "10.96.0.10")
    elif kind == "PodDisruptionBudget":
        item["status"] = {
            "observedGeneration": generation,
            "conditions": [{"type": "DisruptionAllowed", "status": "True"}],
            "currentHealthy": 1,
            "desiredHealthy": 1,
            "disruptionsAllowed": 0,
            "expectedPods": 1,
        }


def replica_set(deployment: Json) -> Json:
    """The ReplicaSet that a Deployment's controller makes for its present template."""
    metadata, spec = deployment["metadata"], deployment["spec"]
    template = deepcopy(spec["template"])
    mark = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
    labels = template.setdefault("metadata", {}).setdefault("labels", {}) | {"pod-template-hash": mark}
    template["metadata"]["labels"] = labels
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata["name"], "uid": metadata["uid"]}
    selector = {"matchLabels": spec["selector"]["matchLabels"] | {"pod-template-hash": mark}}
    return {
        "metadata": {
            "name": f"{metadata['name']}-{mark}",
            "labels": labels,
            "ownerReferences": [owner | {"controller": True}],
        },
        "spec": {"replicas": spec["replicas"], "selector": selector, "template": template},
    }
