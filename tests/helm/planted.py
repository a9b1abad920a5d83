"""Faults put into the rendered chart on purpose: each change breaks one thing in a copy of a case's objects."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from tests.helm.cases import rendered
from tests.helm.manifests import Manifests

Json = dict[str, Any]
Objects = dict[str, Json]
Break = Callable[[Objects], None]


def broken(case: str, change: Break) -> Manifests:
    """A case's objects after a change; the change gets them by kind, by 'KIND NAME', the runner's pod as 'pod'."""
    objects = deepcopy(list(rendered(case).objects))
    by_kind = {item["kind"]: item for item in reversed(objects)}
    by_kind |= {f"{item['kind']} {item['metadata']['name']}": item for item in objects}
    by_kind["pod"] = next(
        item["spec"]["template"]
        for item in objects
        if item["kind"] == "Deployment" and "initContainers" in item["spec"]["template"]["spec"]
    )
    change(by_kind)
    return Manifests(objects)


def container(objects: Objects, name: str = "model-runner") -> Json:
    specs = [item["spec"]["template"]["spec"] for key, item in objects.items() if key.startswith("Deployment ")]
    containers = [each for spec in specs for each in spec.get("initContainers", []) + spec["containers"]]
    return next(each for each in containers if each["name"] == name)


def replace_argument(objects: Objects, old: str, new: str, name: str = "model-runner") -> None:
    """Changes the arguments of a container that begin with `old`."""
    arguments = container(objects, name)["args"]
    found = [place for place, word in enumerate(arguments) if word.startswith(old)]
    assert found
    for place in found:
        arguments[place] = new


def set_in(*path: Any, to: Any) -> Break:
    """A change that sets one field, by its path from an object's kind."""

    def change(objects: Objects) -> None:
        place: Any = objects
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return change


def drop(*path: Any) -> Break:
    """A change that removes one field."""

    def change(objects: Objects) -> None:
        place: Any = objects
        for step in path[:-1]:
            place = place[step]
        del place[path[-1]]

    return change


def in_container(field: str, value: Any, name: str = "model-runner") -> Break:
    return lambda objects: container(objects, name).__setitem__(field, value)


def argument(old: str, new: str, name: str = "model-runner") -> Break:
    return lambda objects: replace_argument(objects, old, new, name)
