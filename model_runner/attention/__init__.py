"""Attention backends by name."""

from __future__ import annotations

from model_runner.attention.backend import AttentionBackend, AttentionShape
from model_runner.attention.cpu import CpuAttention
from model_runner.attention.cpu_torch import TorchCpuAttention
from model_runner.attention.flash_attn import FlashAttention
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.attention.triton import TritonAttention

__all__ = ["BACKENDS", "AttentionBackend", "AttentionShape", "create_backend"]

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


def create_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend `name`, or for 'auto' the device's fastest. Raises ValueError for a name that does not exist.

    For 'cpu' it is 'cpu_torch' where there are no kernels for such a cache.
    """
    if name == "auto":
        name = CpuAttention.name if shape.device.type == "cpu" else ReferenceAttention.name
    if name not in BACKENDS:
        raise ValueError(f"there is no attention backend {name!r}; there are auto, {', '.join(sorted(BACKENDS))}")
    if name == CpuAttention.name and CpuAttention.why_not(shape) is not None:
        name = TorchCpuAttention.name
    return BACKENDS[name](shape)
