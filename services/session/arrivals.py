"""What has come over a link and is not taken yet: one thread puts it in, another takes it out."""

from __future__ import annotations

import queue
import time

from octavo.kv.v1 import kv_manager_pb2 as pb


class LinkBroken(Exception):
    """The stream has ended. code: the gRPC status by name; reason: the KV manager's word, empty when it sent none."""

    def __init__(self, sentence: str, code: str = "UNAVAILABLE", reason: str = "") -> None:
        super().__init__(sentence)
        self.code = code
        self.reason = reason


class Arrivals:
    """Messages in their order, each with the time at which it came; the last thing is why no more come."""

    def __init__(self) -> None:
        self.received_at = 0.0
        """When the message that take() returned last had come, in seconds of time.monotonic()."""
        self._items: queue.SimpleQueue[tuple[float, pb.SessionResponse | LinkBroken]] = queue.SimpleQueue()
        self._broken: LinkBroken | None = None

    def put(self, item: pb.SessionResponse | LinkBroken) -> None:
        """Notes that something has come now."""
        self._items.put((time.monotonic(), item))

    def take(self, seconds: float) -> pb.SessionResponse | None:
        """The next message; None when none comes within so many seconds. Raises LinkBroken, and from then on always."""
        if self._broken is not None:
            raise self._broken
        try:
            self.received_at, item = self._items.get(timeout=seconds) if seconds > 0 else self._items.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, LinkBroken):
            self._broken = item
            raise item
        return item
