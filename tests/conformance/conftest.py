"""One KV manager for all conformance tests, and a pool of its own for each; after each test the books are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.kv_process import RunningKvManager
from tests.conformance.client import Client
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager


@pytest.fixture(scope="session")
def kv_manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningKvManager]:
    directory: Path = tmp_path_factory.mktemp("kv")
    with running_kv_manager(kv_settings(directory)) as running:
        yield running


@pytest.fixture(scope="session")
def stub(kv_manager: RunningKvManager) -> Iterator[Any]:
    with kv_stub(kv_manager.address) as stub:
        yield stub


@pytest.fixture
def new_pool(stub: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Client]]:
    """Opens a pool of the given facts; each is checked at the end."""
    made: list[Client] = []

    def opened(*facts: Any, **more: Any) -> Client:
        client = Client(stub, f"{request.node.name} {len(made)}")
        client.open(*facts, **more)
        made.append(client)
        return client

    yield opened
    for client in made:
        assert list(client.check().violations) == []


@pytest.fixture
def pool(new_pool: Callable[..., Client]) -> Client:
    """The reference's pool 11: 10 usable blocks of 16 tokens."""
    return new_pool()
