"""One attempt to speak with a KV manager: a bidirectional stream that never makes its owner wait."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import grpc
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import ClientTls, open_channel
from services.errors import StartupError, describe_rpc_error
from services.session.arrivals import Arrivals, LinkBroken
from services.short_slices import ask_for_short_slices

__all__ = ["Dial", "GrpcLink", "Link", "LinkBroken", "close_pool"]


class Link(Protocol):
    """A stream in the making, open, or broken; made anew for each attempt."""

    @property
    def connected(self) -> bool:
        """Whether somebody who speaks the contract is at the other end. Only then is send() of use."""
        ...

    def send(self, request: pb.SessionRequest) -> None:
        """Puts a message on its way; never waits and never raises. Any thread may call it."""
        ...

    def receive(self, seconds: float) -> pb.SessionResponse | None:
        """The next message; None when none comes within so many seconds. Raises LinkBroken, and from then on always."""
        ...

    @property
    def received_at(self) -> float:
        """When the message that receive() returned last had come, in seconds of the owner's clock."""
        ...

    def close_pool(self, request: pb.ClosePoolRequest, seconds: float) -> None:
        """Gives a pool up, if it can be done within so many seconds; never raises."""
        ...

    def close(self) -> None:
        """Ends the stream; never waits and never raises."""
        ...


Dial = Callable[[], Link]
"""Begins an attempt. Raises LinkBroken when it has failed already."""


def close_pool(channel: grpc.Channel, request: pb.ClosePoolRequest, seconds: float) -> None:
    """Gives a pool up, if it can be done within so many seconds; never raises."""
    try:
        kv_manager_pb2_grpc.KvManagerServiceStub(channel).ClosePool(request, timeout=seconds)
    except (grpc.RpcError, ValueError):
        # It is gone, or another runner has the pool: nothing of ours is left in it.
        return


class GrpcLink:
    """A Link over gRPC, with a thread that reads; gRPC has one of its own that writes."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """Raises LinkBroken when the TLS files are bad: they may be in the middle of a change."""
        self._address = address
        try:
            self._channel = open_channel(address, tls)
        except StartupError as error:
            raise LinkBroken(str(error)) from None
        self._outbox: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._arrivals = Arrivals()
        self._connected = threading.Event()
        stub = kv_manager_pb2_grpc.KvManagerServiceStub(self._channel)
        self._call = stub.Session(self._requests(), wait_for_ready=True)
        self._ready = grpc.channel_ready_future(self._channel)
        self._ready.add_done_callback(self._note_ready)
        threading.Thread(target=self._read, name="octavo-session", daemon=True).start()

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def send(self, request: pb.SessionRequest) -> None:
        self._outbox.put(request)

    def receive(self, seconds: float) -> pb.SessionResponse | None:
        return self._arrivals.take(seconds)

    @property
    def received_at(self) -> float:
        return self._arrivals.received_at

    def close_pool(self, request: pb.ClosePoolRequest, seconds: float) -> None:
        close_pool(self._channel, request, seconds)

    def close(self) -> None:
        self._outbox.put(None)
        self._call.cancel()
        self._ready.cancel()
        self._channel.close()

    def _note_ready(self, ready: grpc.Future) -> None:
        if not ready.cancelled():
            self._connected.set()

    def _requests(self) -> Iterator[pb.SessionRequest]:
        while (request := self._outbox.get()) is not None:
            yield request

    def _read(self) -> None:
        ask_for_short_slices()
        try:
            for response in self._call:
                self._arrivals.put(response)
            broken = LinkBroken(f"the KV manager at {self._address} has ended the session")
        except grpc.RpcError as error:
            view = describe_rpc_error(error)
            sentence = view.sentence if view.reason else f"no answer from the KV manager at {self._address}"
            broken = LinkBroken(sentence, view.code, view.reason)
        self._arrivals.put(broken)
