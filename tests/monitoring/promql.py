"""PromQL as promql-parser reads it."""

from __future__ import annotations

from typing import Any

from tests.required import require_module

require_module("promql_parser", "`make test` brings it")

import promql_parser  # noqa: E402

_PARTS = ("expr", "lhs", "rhs", "param", "vector_selector")


def parse(expression: str) -> Any:
    """The tree. Raises ValueError for what Prometheus would refuse."""
    return promql_parser.parse(expression)


def selectors(node: Any) -> list[Any]:
    """The vector selectors of a tree."""
    found = [node] if type(node).__name__ == "VectorSelector" else []
    children = [getattr(node, part, None) for part in _PARTS] + list(getattr(node, "args", None) or [])
    for child in children:
        if child is not None and not isinstance(child, str | bytes | float | int):
            found += selectors(child)
    return found


def metrics(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    return {selector.name for selector in selectors(parse(expression))}
