"""SIGTERM and SIGINT on an event loop: the first asks for a graceful stop, the second ends the process at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signal() -> Iterator[asyncio.Event]:
    """Yields an event that the first SIGTERM or SIGINT sets; the next one ends the process.

    Call it on the main thread's event loop.
    """
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def stop() -> None:
        _release(loop)
        for each in STOP_SIGNALS:
            # Python's own handler of SIGINT would wait for whatever the loop is at.
            signal.signal(each, signal.SIG_DFL)
        stopped.set()

    for each in STOP_SIGNALS:
        loop.add_signal_handler(each, stop)
    try:
        yield stopped
    finally:
        _release(loop)


def _release(loop: asyncio.AbstractEventLoop) -> None:
    for each in STOP_SIGNALS:
        loop.remove_signal_handler(each)
