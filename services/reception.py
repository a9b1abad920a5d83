"""Requests between their arrival and the engine's queue, while their prompts become tokens: bounded like the queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from model_runner.engine import Engine
from model_runner.engine_types import QueueFull

MAX_BYTES = 256 << 20
"""Of all messages that are here at a time."""
RETRY_SECONDS = 0.5
"""What who finds too many bytes here is told to wait: tokenising takes seconds for the largest messages at most."""


class Reception:
    """Belongs to the event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._requests = 0
        self._bytes = 0

    @contextmanager
    def receive(self, engine: Engine, size: int) -> Iterator[None]:
        """Around the time that a message of `size` bytes is here. Raises QueueFull when there is no room for it."""
        engine.check_room(self._requests)
        if self._requests and self._bytes + size > self._max_bytes:
            raise QueueFull(
                f"{self._requests} requests of {self._bytes} bytes are being read, and {size} more are too many "
                f"(at most {self._max_bytes}); retry later",
                RETRY_SECONDS,
            )
        self._requests += 1
        self._bytes += size
        try:
            yield
        finally:
            self._requests -= 1
            self._bytes -= size
