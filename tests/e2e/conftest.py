"""Shared by the end-to-end tests: whatever fails, no process is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stack import Process


@pytest.fixture(scope="session", autouse=True)
def _leave_no_process() -> Iterator[None]:
    yield
    Process.kill_all()
