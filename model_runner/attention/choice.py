"""Which backend attends: the first of an order that can, and what is against those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from model_runner.attention.backend import AttentionBackend, AttentionShape
from model_runner.attention.cpu import CpuAttention
from model_runner.attention.cpu_torch import TorchCpuAttention
from model_runner.attention.flash_attn import FlashAttention
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.nhd import GpuAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.attention.trial import why_broken
from model_runner.attention.triton import TritonAttention

AUTO = "auto"
BACKENDS: dict[str, type[AttentionBackend]] = {
    each.name: each
    for each in (
        FlashInferAttention,
        FlashAttention,
        TritonAttention,
        CpuAttention,
        TorchCpuAttention,
        ReferenceAttention,
    )
}
_ON_CPU = (CpuAttention, TorchCpuAttention, ReferenceAttention)
_ON_GPU = (FlashInferAttention, FlashAttention, TritonAttention, ReferenceAttention)


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, by name what was against each that comes before it, and the names of those after it."""

    backend: AttentionBackend
    refused: tuple[tuple[str, str], ...]
    behind: tuple[str, ...]

    def describe(self) -> str:
        """One line for the log: 'triton (not flashinfer: ...; not flash_attn: ...; before reference)'."""
        reasons = [f"not {name}: {reason}" for name, reason in self.refused]
        if self.behind:
            reasons.append(f"before {', '.join(self.behind)}")
        return f"{self.backend.name} ({'; '.join(reasons)})" if reasons else self.backend.name


def order_of(name: str, device: torch.device) -> Sequence[type[AttentionBackend]]:
    """The backends to try, best first: the device's own, before them the named one.

    Raises ValueError for a name that does not exist.
    """
    own = _ON_CPU if device.type == "cpu" else _ON_GPU
    if name == AUTO:
        return own
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; there are auto, {', '.join(sorted(BACKENDS))}")
    return (BACKENDS[name], *(each for each in own if each.name != name))


def choose(order: Sequence[type[AttentionBackend]], shape: AttentionShape) -> Choice:
    """The first backend of the order that can have the cache, with its memory; the last must be able to.

    Kernels for GPUs must pass a trial. Raises what torch raises when there is too little memory.
    """
    refused: list[tuple[str, str]] = []
    for place, candidate in enumerate(order):
        reason = candidate.why_not(shape)
        if reason is None and issubclass(candidate, GpuAttention):
            reason = why_broken(candidate, shape)
        if reason is None:
            return Choice(candidate(shape), tuple(refused), tuple(each.name for each in order[place + 1 :]))
        refused.append((candidate.name, reason))
    raise ValueError(f"no attention backend can be had: {refused}")


def create_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend `name` or, where it can't be had, the device's best; 'auto' is the device's best.

    Raises ValueError for a name that does not exist.
    """
    return choose(order_of(name, shape.device), shape).backend
