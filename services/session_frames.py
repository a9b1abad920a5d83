"""Sessions over a byte stream: gRPC's own length-prefixed messages, with a greeting before them and a status behind.

A frame is one byte for its kind, four for the length of its payload (big-endian), and the payload. Messages of the
contract have kind 0, as in a gRPC call; the status that ends the stream has kind 0x80, as the trailers of gRPC-Web.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from google.protobuf.message import Message
from octavo.kv.v1 import kv_manager_pb2 as pb

MESSAGE: Final = 0x00
"""A SessionRequest or a SessionResponse."""
GREETING: Final = 0x40
"""The first frame of the KV manager; its payload is CONTRACT."""
STATUS: Final = 0x80
"""The last frame of the KV manager; its payload is a google.rpc.Status."""

CONTRACT: Final = f"{pb.DESCRIPTOR.services_by_name['KvManagerService'].full_name}/Session".encode()
"""What is spoken: the verb by its full name, which has the version in it."""

_HEADER: Final = Struct(">BI")
_KINDS: Final = frozenset({MESSAGE, GREETING, STATUS})


class FrameFault(Exception):
    """The bytes are no frames."""


class FrameTooLong(FrameFault):
    """A frame has more bytes than are taken."""


def frame(kind: int, payload: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(kind, len(payload)) + payload


def message_frame(message: Message) -> bytes:
    """The frame of a message of the contract."""
    return frame(MESSAGE, message.SerializeToString())


class FrameReader:
    """Cuts what comes into frames. It keeps what max_bytes and one feed() have at most, if it is emptied after each."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> None:
        """Takes in what has come."""
        self._data += data

    @property
    def has_next(self) -> bool:
        """Whether next() has a frame to return or a fault to raise."""
        if len(self._data) < _HEADER.size:
            return False
        kind, length = _HEADER.unpack_from(self._data)
        is_whole = len(self._data) >= _HEADER.size + length
        return is_whole or kind not in _KINDS or length > self._max_bytes

    def next(self) -> tuple[int, bytes] | None:
        """Kind and payload of the next frame; None until all of it has come. Raises FrameFault, FrameTooLong."""
        if len(self._data) < _HEADER.size:
            return None
        kind, length = _HEADER.unpack_from(self._data)
        if kind not in _KINDS:
            raise FrameFault(f"a frame has the unknown kind {kind:#04x}")
        if length > self._max_bytes:
            raise FrameTooLong(f"a message has {length} bytes, and {self._max_bytes} are taken at most")
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_HEADER.size : end])
        del self._data[:end]
        return kind, payload
