"""The histories that the books are tested with in-process, over gRPC: the same verbs, refusals, events and contents."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvmanager.types import PoolSpec
from tests.kvmanager.books_machine import BooksMachine
from tests.kvmanager.books_port import BooksPort
from tests.services.books_over_grpc import GrpcPort
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager

# Each step is a hundred calls and more: a failure is told as it was found, because making it short would take minutes.
HISTORIES = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_random_histories_over_grpc(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:

        class OverGrpc(BooksMachine):
            def make_port(self, spec: PoolSpec) -> BooksPort:
                return GrpcPort(running, stub, spec)

        run_state_machine_as_test(OverGrpc, settings=HISTORIES)
