"""Copies between host and device that nobody waits for, by two page-locked buffers in turn.

A buffer that a copy reads must not be written, and one that a copy writes must not be read, until the device has done
the copy. Whoever forgets that reads what another step meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

Send = Callable[[Sequence[Tensor]], list[Tensor]]
"""Brings tensors of the host to the device, in the order of its work."""

_ALIGNMENT = 16
_FIRST_BYTES = 1 << 16


class Mark(Protocol):
    """A moment in the device's work."""

    def wait(self) -> None:
        """Returns once all work before it is done. Raises what the device says of it."""
        ...


class Lane(Protocol):
    """The device's work, which is done in the order in which it was given."""

    def host_bytes(self, count: int) -> Tensor:
        """Host memory that copies can read and write while the host goes on: uint8 [count]."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies between device and such memory; returns at once."""
        ...

    def mark(self) -> Mark:
        """This moment, behind all work so far."""
        ...


class CudaLane:
    """The current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def host_bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        return _CudaMark(self._device)


class _CudaMark:
    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self._event.synchronize()


class Uploads:
    """Sends host tensors to a device, those of one call in one copy. One thread uses it."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane = lane
        self._device = device
        self._buffers = [lane.host_bytes(0), lane.host_bytes(0)]
        self._marks: list[Mark | None] = [None, None]
        self._turn = 0

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors on the device; waits only for the copy of the call before the last."""
        places, size = _places(tensors)
        self._turn ^= 1
        mark, self._marks[self._turn] = self._marks[self._turn], None
        if mark is not None:
            mark.wait()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = self._lane.host_bytes(max(_FIRST_BYTES, 2 * size))
        buffer = self._buffers[self._turn]
        for tensor, part in zip(tensors, _parts(buffer, tensors, places), strict=True):
            part.copy_(tensor)
        sent = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._lane.copy(sent, buffer[:size])
        self._marks[self._turn] = self._lane.mark()
        return _parts(sent, tensors, places)


class Download:
    """Tensors on their way to the host."""

    def __init__(self, parts: list[Tensor], mark: Mark) -> None:
        self._parts = parts
        self._mark = mark
        self._taken: list[Tensor] | None = None

    def take(self) -> list[Tensor]:
        """The tensors, once they are there. Raises what the device says of the work before."""
        if self._taken is None:
            self._mark.wait()
            # The buffer is another step's next.
            self._taken = [part.clone() for part in self._parts]
            self._parts = []
        return self._taken


class Downloads:
    """Fetches tensors from a device. One thread uses it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._buffers = [lane.host_bytes(0), lane.host_bytes(0)]
        self._pending: list[Download | None] = [None, None]
        self._turn = 0

    def fetch(self, tensors: Sequence[Tensor]) -> Download:
        """Begins to copy tensors; waits only for the call before the last, should nobody have taken what it fetched."""
        places, size = _places(tensors)
        self._turn ^= 1
        pending, self._pending[self._turn] = self._pending[self._turn], None
        if pending is not None:
            pending.take()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = self._lane.host_bytes(max(_FIRST_BYTES, 2 * size))
        parts = _parts(self._buffers[self._turn], tensors, places)
        for tensor, part in zip(tensors, parts, strict=True):
            self._lane.copy(part, tensor)
        download = self._pending[self._turn] = Download(parts, self._lane.mark())
        return download


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; a GPU copies it from page-locked memory of its own, and nobody waits."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each tensor begins in a buffer, in bytes, and how many all take."""
    ends = list(accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0))
    return ends[:-1], ends[-1]


def _parts(buffer: Tensor, like: Sequence[Tensor], places: Sequence[int]) -> list[Tensor]:
    """Views of a buffer that look like tensors."""
    return [
        buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(like, places, strict=True)
    ]
