"""The driver process of one system: python -m bench.serve.driver MODULE OPTIONS.

It runs in the system's own environment. MODULE has create(options) -> System. The first line out is a JSON object of
versions; each line in is a workload, and its answer is a run. End of input ends the system. Standard library only.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any, TextIO

from bench.serve.system import System
from bench.serve.workloads import Workload


async def drive(module: str, options: dict[str, Any], answers: TextIO) -> None:
    """Starts the system and serves lines until there are no more, or until SIGTERM."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    system: System = await importlib.import_module(module).create(options)
    try:
        print(json.dumps(dict(system.versions)), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            run = await system.run(Workload.from_json(json.loads(line)))
            print(json.dumps(run.to_json()), file=answers, flush=True)
    finally:
        await system.close()


def main() -> None:
    module, options = sys.argv[1:]
    # What libraries print must not get between the answers: it goes where the errors go.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with suppress(asyncio.CancelledError):
        asyncio.run(drive(module, json.loads(options), answers))


if __name__ == "__main__":
    main()
