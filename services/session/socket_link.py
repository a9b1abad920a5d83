"""A link over the socket beside a KV manager's address: frames that the engine's thread writes, and a thread reads."""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.addresses import UnixAddress
from services.channels import open_channel
from services.errors import view_of_status
from services.session.arrivals import Arrivals, LinkBroken
from services.session.link import close_pool
from services.session_frames import CONTRACT, GREETING, MESSAGE, STATUS, FrameFault, FrameReader, message_frame
from services.short_slices import ask_for_short_slices

_READ_BYTES: Final = 1 << 16
_MAX_BYTES: Final = (1 << 31) - 1
"""Of one message; the KV manager may say as much as protobuf can."""


def connect(address: UnixAddress) -> socket.socket | None:
    """A connection to who listens there, made without waiting; None when nobody does.

    Raises LinkBroken when so many wait to be taken that there is no place left.
    """
    made = socket.socket(socket.AF_UNIX)
    made.setblocking(False)
    try:
        made.connect(address.path)
    except BlockingIOError:
        made.close()
        raise LinkBroken(f"the KV manager at {address} takes no connections") from None
    except OSError:
        made.close()
        return None
    made.setblocking(True)
    return made


class SocketLink:
    """A Link over a connection that is made already."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """address: of the KV manager's other verbs."""
        self.is_foreign = False
        """Whether somebody else than a KV manager of this contract is at the other end."""
        self._socket = connection
        self._address = address
        self._arrivals = Arrivals()
        self._connected = threading.Event()
        self._lock = threading.Lock()
        self._is_open = True
        self._unsent: deque[bytes] = deque()
        """What the system had no room for; while there is something, a thread is writing it."""
        self._writer: threading.Thread | None = None
        threading.Thread(target=self._read, name="octavo-session", daemon=True).start()

    @property
    def connected(self) -> bool:
        return self._connected.is_set()

    def send(self, request: pb.SessionRequest) -> None:
        data = message_frame(request)
        with self._lock:
            if not self._is_open:
                return
            if not self._unsent:
                data = data[self._send_now(data) :]
                if not data:
                    return
                self._writer = threading.Thread(target=self._write, name="octavo-session-write", daemon=True)
                self._writer.start()
            self._unsent.append(data)

    def receive(self, seconds: float) -> pb.SessionResponse | None:
        return self._arrivals.take(seconds)

    @property
    def received_at(self) -> float:
        return self._arrivals.received_at

    def close_pool(self, request: pb.ClosePoolRequest, seconds: float) -> None:
        with open_channel(self._address) as channel:
            close_pool(channel, request, seconds)

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _send_now(self, data: bytes) -> int:
        """How many bytes the system has taken; all of them when it is of no use to try again."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            # The reading thread finds out why.
            return len(data)

    def _write(self) -> None:
        """Writes what is unsent, until nothing is."""
        while True:
            with self._lock:
                data = self._unsent[0]
            with suppress(OSError):
                self._socket.sendall(data)
            with self._lock:
                self._unsent.popleft()
                if not self._unsent:
                    return

    def _hang_up(self) -> None:
        """Ends what both threads wait for."""
        self._is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        ask_for_short_slices()
        self._arrivals.put(self._read_all())
        self.close()
        # Nobody begins to write any more; only when nobody does may the number of the file be another's.
        if self._writer is not None:
            self._writer.join()
        with self._lock:
            self._socket.close()

    def _read_all(self) -> LinkBroken:
        """Takes what comes, until nothing more does; returns why."""
        frames = FrameReader(_MAX_BYTES)
        view = memoryview(bytearray(_READ_BYTES))
        try:
            while count := self._socket.recv_into(view):
                frames.feed(view[:count])
                while (frame := frames.next()) is not None:
                    if (broken := self._take(*frame)) is not None:
                        return broken
        except OSError:
            # How it ended says nothing; that no status came does.
            return self._no_answer()
        except (FrameFault, DecodeError):
            self.is_foreign = not self.connected
            return LinkBroken(f"what comes from beside {self._address} is no session", "INTERNAL")
        return self._no_answer()

    def _take(self, kind: int, payload: bytes) -> LinkBroken | None:
        """Takes one frame; returns why the stream has ended, if it has."""
        if not self.connected:
            if (kind, payload) != (GREETING, CONTRACT):
                raise FrameFault("no greeting of this contract")
            self._connected.set()
        elif kind == STATUS:
            return self._ended(status_pb2.Status.FromString(payload))
        elif kind == MESSAGE:
            self._arrivals.put(pb.SessionResponse.FromString(payload))
        return None

    def _ended(self, status: status_pb2.Status) -> LinkBroken:
        view = view_of_status(status)
        if view.code == grpc.StatusCode.OK.name:
            return LinkBroken(f"the KV manager at {self._address} has ended the session")
        return LinkBroken(view.sentence, view.code, view.reason)

    def _no_answer(self) -> LinkBroken:
        return LinkBroken(f"no answer from the KV manager at {self._address}")
