"""What the device is, and what it does at best: a copy and a matrix product, by which the kernels are judged."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

import torch

from bench.gpu.counts import matmul_flops
from bench.gpu.place import Place

_PACKAGES = ("torch", "triton", "flashinfer-python", "flash-attn", "transformers")


def facts(place: Place) -> Iterator[dict[str, object]]:
    """Names and versions."""
    found: dict[str, object] = {"device": str(place.device), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if place.is_gpu:
        properties = torch.cuda.get_device_properties(place.device)
        found |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    yield found


def speeds(place: Place) -> Iterator[dict[str, object]]:
    """copy_gb_s: bytes read and written per second; matmul_tflop_s: of a square product in the model's type."""
    sizes = place.sizes
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    copied = place.time(lambda: target.copy_(source))
    side = (sizes.matmul, sizes.matmul)
    left, right = (torch.randn(side, device=place.device, dtype=sizes.dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiplied = place.time(lambda: torch.mm(left, right, out=product))
    yield {
        "copy_gb_s": 2 * sizes.copy_bytes / copied / 1e9,
        "matmul_tflop_s": matmul_flops(sizes.matmul, sizes.matmul, sizes.matmul) / multiplied / 1e12,
    }
