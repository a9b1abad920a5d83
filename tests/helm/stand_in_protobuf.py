"""What clients of the stand-in API send as protobuf: Secrets, in which helm keeps its releases, and DeleteOptions.

Field numbers are those of k8s.io/api/core/v1/generated.proto.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

MAGIC = b"k8s\0"


def decode(raw: bytes) -> dict[str, Any]:
    """A Secret whole; of any other object, its kind alone."""
    envelope = dict(_fields(raw.removeprefix(MAGIC)))
    kind = dict(_fields(envelope[1])).get(2, b"").decode()
    if kind != "Secret":
        return {"kind": kind}
    secret = list(_fields(envelope.get(2, b"")))
    single = dict(secret)
    return {
        "kind": kind,
        "apiVersion": "v1",
        "metadata": _metadata(single[1]),
        "data": _string_map(secret, 2, lambda value: base64.b64encode(value).decode()),
        "type": single.get(3, b"").decode(),
    }


def _metadata(raw: bytes) -> dict[str, Any]:
    fields = list(_fields(raw))
    single = dict(fields)
    found = {
        "name": single.get(1, b"").decode(),
        "namespace": single.get(3, b"").decode(),
        "resourceVersion": single.get(6, b"").decode(),
        "labels": _string_map(fields, 11, bytes.decode),
    }
    return {name: value for name, value in found.items() if value}


def _string_map(fields: list[tuple[int, Any]], number: int, read: Callable[[bytes], str]) -> dict[str, str]:
    entries = (dict(_fields(value)) for found, value in fields if found == number)
    return {entry[1].decode(): read(entry.get(2, b"")) for entry in entries}


def _fields(raw: bytes) -> Iterator[tuple[int, Any]]:
    """The wire format: each field's number with an int, or with its bytes."""
    place = 0
    while place < len(raw):
        tag, place = _varint(raw, place)
        kind = tag & 7
        if kind == 0:
            value, place = _varint(raw, place)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, place = _varint(raw, place)
        else:
            size = {1: 8, 5: 4}[kind]
        yield tag >> 3, raw[place : place + size]
        place += size


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
