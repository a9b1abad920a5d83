"""Octavo's contract (`octavo.kv.v1`, `octavo.runner.v1`) and, at the top, the client that wraps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    # Late, so that the stubs can be imported without the client's dependencies.
    if name in __all__:
        from services import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
