"""A KV manager in a process of its own, on a Unix socket, for what is measured against it."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path


def _serve(address: str, more: dict[str, object]) -> None:
    import asyncio

    from services.config import KvManagerSettings, load_settings
    from services.kv_process import serve_kv_manager
    from services.logging import configure_logging

    configure_logging("warning", "console", service="kv-manager")
    given = {"kv_address": address, "kv_metrics_address": "127.0.0.1:0"} | more
    asyncio.run(serve_kv_manager(load_settings(KvManagerSettings, given)))


@contextmanager
def kv_manager(**settings: object) -> Iterator[str]:
    """The address of a KV manager, which may not listen yet; it ends with the block. settings: of its own."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/kv.sock"
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(address, settings))
        process.start()
        try:
            yield address
        finally:
            process.terminate()
            process.join()


@contextmanager
def kv_manager_of(tree: Path, session_silence_seconds: int) -> Iterator[str]:
    """The same of another working tree, by this interpreter; its last words go to standard error."""
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/kv.sock"
        given = {
            "--kv-address": address,
            "--kv-metrics-address": "127.0.0.1:0",
            "--session-silence-seconds": str(session_silence_seconds),
            "--log-level": "warning",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli", "kv-manager", *chain.from_iterable(given.items())],
            env=os.environ | {"PYTHONPATH": f"{tree.resolve()}/protos{os.pathsep}{tree.resolve()}"},
            cwd=directory,
        )
        try:
            yield address
        finally:
            process.terminate()
            process.wait()
