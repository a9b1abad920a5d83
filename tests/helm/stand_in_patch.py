"""How the stand-in API changes an object: JSON merge patch, strategic merge patch and server-side apply.

Lists whose elements have an identity (containers by name, mounts by path) are changed element by element; all others
are replaced whole. Which are which is a table of the fields that charts use, and not the API's own types.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

Json = dict[str, Any]

_BY_NAME = ("containers", "initContainers", "volumes", "env", "imagePullSecrets", "secrets")
LIST_KEYS = dict.fromkeys(_BY_NAME, "name") | {
    "volumeMounts": "mountPath",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
    "conditions": "type",
}
_PORTS = ("containerPort", "port")
_DIRECTIVES = ("$setElementOrder/", "$deleteFromPrimitiveList/", "$retainKeys", "$patch")


def merge_patch(current: Json, patch: Json) -> Json:
    """RFC 7386: null removes, maps are merged, all else replaces."""
    result = dict(current)
    for field, value in patch.items():
        old = result.get(field)
        if value is None:
            result.pop(field, None)
        elif isinstance(value, dict):
            result[field] = merge_patch(old if isinstance(old, dict) else {}, value)
        else:
            result[field] = value
    return result


def strategic_merge_patch(current: Json, patch: Json) -> Json:
    """As JSON merge patch, but lists with identities are merged, and $patch and $setElementOrder are obeyed."""
    if patch.get("$patch") == "replace":
        return {field: value for field, value in patch.items() if field != "$patch"}
    result = dict(current)
    for field, value in patch.items():
        if field.startswith(_DIRECTIVES):
            continue
        if value is None:
            result.pop(field, None)
        else:
            result[field] = _strategic(field, result.get(field), value)
    for field in [each for each in patch if each.startswith("$setElementOrder/")]:
        name = field.removeprefix("$setElementOrder/")
        if isinstance(result.get(name), list):
            result[name] = _in_order(name, result[name], patch[field])
    return result


def _strategic(field: str, old: Any, new: Any) -> Any:
    if isinstance(new, dict):
        return strategic_merge_patch(old if isinstance(old, dict) else {}, new)
    key = list_key(field, new)
    if key is None or not isinstance(old, list):
        return new
    by_key = {each[key]: each for each in old}
    for element in new:
        if element.get("$patch") == "delete":
            by_key.pop(element[key], None)
        else:
            by_key[element[key]] = strategic_merge_patch(by_key.get(element[key], {}), element)
    return list(by_key.values())


def _in_order(field: str, elements: list[Any], order: list[Any]) -> list[Any]:
    key = list_key(field, order)
    if key is None:
        return elements
    places = {each[key]: place for place, each in enumerate(order)}
    return sorted(elements, key=lambda each: places.get(each[key], len(places)))


def server_side_apply(current: Json, before: Json, wanted: Json) -> Json:
    """Sets what `wanted` has and removes what the same manager had applied `before` and does not want any more."""
    result = {field: value for field, value in current.items() if field not in before or field in wanted}
    for field, value in wanted.items():
        result[field] = _applied(field, current.get(field), before.get(field), value)
    return result


def _applied(field: str, current: Any, before: Any, wanted: Any) -> Any:
    if isinstance(wanted, dict) and isinstance(current, dict):
        return server_side_apply(current, before if isinstance(before, dict) else {}, wanted)
    key = list_key(field, wanted)
    if key is None or not isinstance(current, list):
        return deepcopy(wanted)
    old = {each[key]: each for each in current}
    ours = {each[key]: each for each in before or []}
    of_others = [each for each in current if each[key] not in ours and each[key] not in {w[key] for w in wanted}]
    mine = [server_side_apply(old.get(each[key], {}), ours.get(each[key], {}), each) for each in wanted]
    return mine + of_others


def list_key(field: str, elements: Any) -> str | None:
    """The field by which the elements of a list are told apart; None for a list that is replaced whole."""
    if not isinstance(elements, list) or not all(isinstance(each, dict) for each in elements):
        return None
    candidates = _PORTS if field == "ports" else (LIST_KEYS.get(field, ""),)
    return next((key for key in candidates if elements and all(key in each for each in elements)), None)
