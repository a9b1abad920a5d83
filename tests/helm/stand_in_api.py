"""A Kubernetes API in memory, enough for real helm and kubectl to install, test, upgrade and uninstall.

stand_in_http serves it on loopback. It has discovery, list and watch with selectors, create, replace, the three kinds
of patch and delete, and refuses what the strict schemas of its Kubernetes version refuse. What it can't do: it
schedules and runs nothing (a Deployment is available and a Pod has succeeded as soon as it is made), admits everything
that is well formed, fills in next to no defaults, knows no conflicts between appliers, and takes custom resources
unseen.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.helm import stand_in_resources
from tests.helm.schemas import strict_faults
from tests.helm.stand_in_patch import merge_patch, server_side_apply, strategic_merge_patch
from tests.helm.stand_in_resources import BUILT_IN, Resource
from tests.helm.stand_in_store import Selection, Store

Json = dict[str, Any]


class ApiError(Exception):
    """A request that is refused, as a Status object says it."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason

    def status(self) -> Json:
        facts = {"status": "Failure", "code": self.code, "reason": self.reason, "message": str(self)}
        return {"kind": "Status", "apiVersion": "v1"} | facts


@dataclass(frozen=True, slots=True)
class Request:
    """A request, read: which objects, by which verb, with which body."""

    method: str
    resource: Resource
    namespace: str | None
    name: str | None
    part: str | None
    query: dict[str, str]
    content_type: str
    body: Json

    @property
    def selection(self) -> Selection:
        labels, fields = self.query.get("labelSelector", ""), self.query.get("fieldSelector", "")
        return Selection(self.resource, self.namespace, labels, fields)

    def not_found(self) -> ApiError:
        return ApiError(404, "NotFound", f'{self.resource.plural} "{self.name}" not found')


class StandInApi:
    """A stand-in for one Kubernetes version ('1.33') with the custom resources that are given."""

    def __init__(self, kubernetes: str = "1.33", custom: Sequence[Resource] = ()) -> None:
        self.kubernetes = kubernetes
        self.resources = (*BUILT_IN, *custom)
        self.store = Store()
        self.requests: list[str] = []
        """'METHOD path' of what was asked, oldest first."""
        namespaces = next(each for each in BUILT_IN if each.kind == "Namespace")
        for name in ("default", "kube-system"):
            self.store.put(namespaces, None, {"metadata": {"name": name}})

    def kinds(self) -> list[str]:
        """The kind of every object but namespaces, sorted."""
        return sorted(each["kind"] for each in self.store.all() if each["kind"] != "Namespace")

    def one(self, kind: str) -> Json:
        """The only object of a kind."""
        [found] = (each for each in self.store.all() if each["kind"] == kind)
        return found

    def describe(self, parts: list[str]) -> Json:
        """Discovery and OpenAPI. Raises ApiError for a path that is neither."""
        prefixes = {each.prefix for each in self.resources}
        match parts:
            case ["version"]:
                return stand_in_resources.version(self.kubernetes)
            case ["api"]:
                return {"kind": "APIVersions", "versions": ["v1"]}
            case ["apis"]:
                return stand_in_resources.group_list(self.resources)
            case ["openapi", "v3"]:
                return stand_in_resources.openapi_index(self.resources)
            case ["openapi", "v3", *rest] if "/".join(rest) in prefixes:
                return stand_in_resources.openapi_of("/".join(rest), self.resources)
            case [_, *rest] if "/".join(parts) in prefixes:
                return stand_in_resources.resource_list("/".join(rest), self.resources)
        raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def find(self, parts: list[str]) -> tuple[Resource, str | None, str | None, str | None]:
        """The resource, namespace, name and subresource of a path. Raises ApiError when there is no such resource."""
        prefix, rest = ("/".join(parts[:2]), parts[2:]) if parts[0] == "api" else ("/".join(parts[:3]), parts[3:])
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        known = (each for each in self.resources if rest and (each.prefix, each.plural) == (prefix, rest[0]))
        resource = next(known, None)
        if resource is None:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")
        return resource, namespace, rest[1] if len(rest) > 1 else None, rest[2] if len(rest) > 2 else None

    def answer(self, request: Request) -> tuple[int, Json, list[str]]:
        """The code, the object and the warnings for a request that is no watch."""
        with self.store.lock:
            match request.method:
                case "GET" if request.name is None:
                    return 200, self._list(request), []
                case "GET":
                    return 200, self._current(request), []
                case "DELETE":
                    return 200, self._delete(request), []
                case "POST":
                    return self._create(request)
                case _:
                    return self._change(request)

    def _list(self, request: Request) -> Json:
        kind, version = request.resource.kind, request.resource.group_version
        metadata = {"resourceVersion": str(self.store.version)}
        items = self.store.select(request.selection)
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": items}

    def _current(self, request: Request) -> Json:
        found = self.store.get(request.resource, request.namespace, request.name or "")
        if found is None:
            raise request.not_found()
        return found

    def _delete(self, request: Request) -> Json:
        if not self.store.delete(request.resource, request.namespace, request.name or ""):
            raise request.not_found()
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"name": request.name}}

    def _create(self, request: Request) -> tuple[int, Json, list[str]]:
        item = request.body
        metadata = item["metadata"]
        metadata.setdefault("name", f"{metadata.get('generateName', '')}{uuid.uuid4().hex[:5]}")
        if self.store.get(request.resource, request.namespace, metadata["name"]):
            raise ApiError(409, "AlreadyExists", f'{request.resource.plural} "{metadata["name"]}" already exists')
        return self._keep(201, request, item)

    def _change(self, request: Request) -> tuple[int, Json, list[str]]:
        where = (request.resource, request.namespace, request.name or "")
        if "apply" in request.content_type:
            current = self.store.get(*where)
            wanted = server_side_apply(current or {}, self.store.last_applied(*where), request.body)
            return self._keep(200 if current else 201, request, wanted, applied=request.body)
        current = self._current(request)
        if request.method == "PUT":
            return self._keep(200, request, request.body)
        change = strategic_merge_patch if "strategic" in request.content_type else merge_patch
        return self._keep(200, request, change(current, request.body))

    def _keep(
        self, code: int, request: Request, item: Json, applied: Json | None = None
    ) -> tuple[int, Json, list[str]]:
        resource = request.resource
        item = item | {"kind": resource.kind, "apiVersion": resource.group_version}
        item, warnings = self._checked(item, strict=request.query.get("fieldValidation") == "Strict")
        if request.query.get("dryRun") == "All":
            return code, item, warnings
        return code, self.store.put(resource, request.namespace, item, applied), warnings

    def _checked(self, item: Json, strict: bool) -> tuple[Json, list[str]]:
        """The object without unknown fields, and a warning for each; with `strict` these are refused."""
        if any((each.kind, each.group_version) == (item["kind"], item["apiVersion"]) for each in self._custom()):
            return item, []
        status = {"status": item["status"]} if "status" in item else {}
        item = {name: value for name, value in item.items() if name != "status"}
        faults = strict_faults(item, self.kubernetes)
        refused = [fault for fault in faults if strict or not fault.unknown]
        if refused:
            what = f'{item["kind"]} in version "{item["apiVersion"]}" cannot be handled: strict decoding error'
            raise ApiError(400, "BadRequest", f"{what}: {'; '.join(map(str, refused))}")
        warnings = []
        for fault in faults:
            warnings += [f'unknown field "{".".join((*map(str, fault.path), name))}"' for name in fault.unknown]
            item = _without(item, fault.path, fault.unknown)
        return item | status, warnings

    def _custom(self) -> list[Resource]:
        return [each for each in self.resources if each.custom]


def _without(item: Any, path: Sequence[Any], names: Sequence[str]) -> Any:
    if not path:
        return {name: value for name, value in item.items() if name not in names}
    changed = item.copy()
    changed[path[0]] = _without(item[path[0]], path[1:], names)
    return changed
