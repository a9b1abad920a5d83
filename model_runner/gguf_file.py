"""The header of a GGUF file: metadata, and where each tensor's bytes are. No length in it is believed unchecked.

Parsed here since the gguf package's reader keeps several arrays for each token of a vocabulary, which takes seconds,
and follows the lengths of a damaged file past its end.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.quants import quant_shape_to_byte_shape
from numpy.typing import NDArray

from model_runner.errors import ModelLoadError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
# A metadata entry has a name's length, a type and a value; a tensor entry much more.
_LEAST_ENTRY_BYTES = 13
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. shape: outermost dimension first, as in torch. offset, num_bytes: bytes in the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file, memory-mapped. `metadata`: numbers, strings, and lists of either, by key."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ModelLoadError for a file that is missing, cut off, damaged or of another kind."""
        self.path = path
        self._bytes = _map(path)
        cursor = _Cursor(path, memoryview(self._bytes))
        num_tensors, num_entries = _read_start(cursor)
        self.metadata = _read_metadata(cursor, num_entries)
        self.tensors = self._read_tensors(cursor, num_tensors)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """A tensor's bytes as they are in the file: the rows of its shape, each as long as its encoding makes it."""
        tensor = self.tensors[name]
        flat = np.frombuffer(self._bytes, np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(quant_shape_to_byte_shape(tensor.shape, tensor.kind))

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        cursor.expect(count, _LEAST_ENTRY_BYTES)
        tensors: dict[str, GgufTensor] = {}
        for _ in range(count):
            name, tensor = _read_tensor(cursor)
            if name in tensors:
                raise ModelLoadError(f"{self.path} is corrupt: it has two tensors named {name!r}.")
            tensors[name] = tensor
        start = _aligned(cursor, self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        return {name: self._placed(name, tensor, start) for name, tensor in tensors.items()}

    def _placed(self, name: str, tensor: GgufTensor, start: int) -> GgufTensor:
        offset = start + tensor.offset
        missing = offset + tensor.num_bytes - len(self._bytes)
        if missing > 0:
            raise ModelLoadError(
                f"{self.path} is cut off: the data of tensor {name} ends {missing} bytes after its end."
            )
        return GgufTensor(tensor.kind, tensor.shape, offset, tensor.num_bytes)


class _Cursor:
    """Reads values one after another, and never past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def take(self, count: int) -> memoryview:
        self.expect(count, 1)
        taken = self._data[self.position : self.position + count]
        self.position += count
        return taken

    def expect(self, count: int, item_bytes: int) -> None:
        """Checks that so many items can be left, before anyone counts up to a damaged number."""
        if count * item_bytes > len(self._data) - self.position:
            raise ModelLoadError(f"{self.path} is cut off or corrupt: its header goes on after the file's end.")

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def text(self) -> str:
        raw = self.take(self.u64())
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.path} is corrupt: text in its header is not UTF-8.") from None

    def array(self, dtype: str, count: int) -> NDArray[Any]:
        self.expect(count, np.dtype(dtype).itemsize)
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist.") from None
    except ValueError:
        raise ModelLoadError(f"{path} is empty.") from None
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}.") from None


def _read_start(cursor: _Cursor) -> tuple[int, int]:
    """Checks magic and version; returns how many tensors and metadata entries follow."""
    if bytes(cursor.take(4)) != _MAGIC:
        raise ModelLoadError(f"{cursor.path} is no GGUF file: it does not begin with {_MAGIC.decode()}.")
    version = cursor.u32()
    if version not in _VERSIONS:
        raise ModelLoadError(f"{cursor.path} has GGUF version {version}; little-endian versions 2 and 3 can be read.")
    return cursor.u64(), cursor.u64()


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    cursor.expect(count, _LEAST_ENTRY_BYTES)
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        metadata[key] = _read_value(cursor, cursor.u32())
    return metadata


def _read_value(cursor: _Cursor, kind: int) -> Any:
    if kind == GGUFValueType.STRING:
        return cursor.text()
    if kind == GGUFValueType.ARRAY:
        return _read_array(cursor)
    return cursor.array(_scalar(cursor, kind), 1).tolist()[0]


def _read_array(cursor: _Cursor) -> list[Any]:
    kind, count = cursor.u32(), cursor.u64()
    if kind == GGUFValueType.STRING:
        cursor.expect(count, 8)
        return [cursor.text() for _ in range(count)]
    return cursor.array(_scalar(cursor, kind), count).tolist()


def _scalar(cursor: _Cursor, kind: int) -> str:
    if kind not in _SCALARS:
        raise ModelLoadError(f"{cursor.path} is corrupt: its header has a value of unknown type {kind}.")
    return _SCALARS[GGUFValueType(kind)]


def _read_tensor(cursor: _Cursor) -> tuple[str, GgufTensor]:
    name, num_dimensions = cursor.text(), cursor.u32()
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ModelLoadError(f"{cursor.path} is corrupt: tensor {name!r} has {num_dimensions} dimensions.")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dimensions)]))
    if 0 in shape:
        raise ModelLoadError(f"{cursor.path} is corrupt: tensor {name!r} has the shape {list(shape)}.")
    number, offset = cursor.u32(), cursor.u64()
    try:
        kind = GGMLQuantizationType(number)
        byte_shape = quant_shape_to_byte_shape(shape, kind)
    except ValueError:
        raise ModelLoadError(
            f"{cursor.path} is corrupt: tensor {name!r} of shape {list(shape)} has encoding {number}, "
            "which is unknown or does not fit its rows."
        ) from None
    return name, GgufTensor(kind, shape, offset, prod(byte_shape))


def _aligned(cursor: _Cursor, alignment: Any) -> int:
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelLoadError(f"{cursor.path} is corrupt: its general.alignment is {alignment!r}.")
    return -(-cursor.position // alignment) * alignment
