"""Octavo's contract (`octavo.kv.v1`, `octavo.runner.v1`) and, at the top, the client that wraps it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.client import AsyncClient, Chunk, Client, ClientTls, GenerateOptions, OctavoError, RetryPolicy
    from services.metrics import octavo_version

    __version__ = octavo_version()

__all__ = [
    "AsyncClient",
    "Chunk",
    "Client",
    "ClientTls",
    "GenerateOptions",
    "OctavoError",
    "RetryPolicy",
    "__version__",
]


def __getattr__(name: str) -> object:
    # Late, so that the stubs can be imported without the client's dependencies.
    if name == "__version__":
        from services.metrics import octavo_version

        return octavo_version()
    if name in __all__:
        from services import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
