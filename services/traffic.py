"""The requests in progress at a model runner, of all its services, and whether it takes new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from model_runner.engine_types import EngineStopped


class Traffic:
    """Belongs to the event loop."""

    def __init__(self) -> None:
        self.stopping = False
        """No new requests are taken."""
        self.in_progress = 0
        self.ended = 0
        """Requests that have ended, well or not."""
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Raises EngineStopped when no new requests are taken."""
        if self.stopping:
            raise EngineStopped("The server is shutting down; send the request to another one.")

    @contextmanager
    def count(self) -> Iterator[None]:
        """Around the life of a request."""
        self.in_progress += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_progress -= 1
            self.ended += 1
            if not self.in_progress:
                self._idle.set()

    async def wait_idle(self, seconds: float) -> None:
        """Returns once no request is in progress, or after so many seconds."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
