"""Shared by all tests: in CI, hypothesis draws the same examples each time, so that a red run can be repeated.

With several workers each takes file by file, so the run is as long as its worst last file. The long ones go first.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("desk", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

# GPU kernels run in Triton's interpreter where there is no GPU, which must be said before anything loads Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _end_what_forks_services() -> Iterator[None]:
    yield
    from tests.e2e.nursery import close_the_nursery

    close_the_nursery()


TESTS = Path(__file__).parent
LONGEST_FIRST = (
    *("e2e/test_soak.py", "e2e/test_golden.py", "e2e/test_commands.py", "e2e/test_kills.py", "e2e/test_fuzz.py"),
    *("e2e/", "gateway/", "monitoring/", "helm/", "images/", "bench/", "services/soak/"),
    *("services/test_books_machine_over_grpc.py", "services/session/test_mirror_machine.py"),
    *("kvmanager/test_books_machine.py", "model_runner/test_native_", "model_runner/test_deterministic.py"),
    *("model_runner/test_steps_on_a_card.py", "model_runner/test_paged_golden.py", "services/test_start_on_a_card.py"),
    *("model_runner/test_uploads.py", "model_runner/test_largest_step.py"),
    *("services/test_cli_kv.py", "services/test_model_setup.py", "kvmanager/test_adaptive.py"),
    *("model_runner/test_decode_graphs.py", "kvmanager/test_planted_faults.py", "services/test_draining.py"),
)
"""Files, or beginnings of their names: those that start processes, compilers or long searches for a fault."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, then those with the most tests. Within a file nothing changes."""
    names = [item.path.relative_to(TESTS).as_posix() for item in items]
    size = Counter(names)

    def place(name: str) -> tuple[int, int, str]:
        long = next((rank for rank, start in enumerate(LONGEST_FIRST) if name.startswith(start)), len(LONGEST_FIRST))
        return long, -size[name], name

    order = sorted(range(len(items)), key=lambda index: place(names[index]))
    items[:] = [items[index] for index in order]
