"""How much of a GPU K/V may have: what is left once the largest step has run beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from model_runner.kv_memory import describe_bytes


class Device(Protocol):
    """What is asked of a device, in bytes. torch's counts are of this process."""

    def free(self) -> int:
        """What nobody has."""

    def total(self) -> int: ...

    def reserved(self) -> int:
        """What torch has taken from the device."""

    def most_reserved(self) -> int:
        """The most of it since the last start_over()."""

    def start_over(self) -> None:
        """Gives back what torch does not use, and counts the most anew."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of a device around the largest step.

    total: all that it has. others: what other processes have, and the device's own part of this one. most: what torch
    had at once, weights included.
    """

    total: int
    others: int
    most: int

    def left(self, utilization: float) -> int:
        """What K/V may have so that no more than this share of the device is in use; 0 when there is nothing."""
        return max(0, int(self.total * utilization) - self.others - self.most)

    def describe(self) -> str:
        """The numbers of a refusal."""
        return (
            f"of {describe_bytes(self.total)} the weights and the largest step take {describe_bytes(self.most)} and "
            f"others {describe_bytes(self.others)}"
        )


def measure(device: Device, largest_step: Callable[[], None]) -> StepMemory:
    """Runs the step, and gives its memory back."""
    device.start_over()
    largest_step()
    most = device.most_reserved()
    device.start_over()
    total = device.total()
    return StepMemory(total=total, others=total - device.free() - device.reserved(), most=most)


class CudaDevice:
    """A GPU of torch's, as a Device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def most_reserved(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def start_over(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
