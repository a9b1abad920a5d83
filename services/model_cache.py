"""The K/V cache of a loaded model: which attention backend has it, and how many blocks it has."""

from __future__ import annotations

from dataclasses import replace

import torch

from model_runner.attention import AttentionBackend, AttentionShape, Choice, choose, order_of
from model_runner.device_copies import CudaLane
from model_runner.device_memory import CudaDevice, Device, StepMemory, measure
from model_runner.executor import TorchExecutor
from model_runner.kv_memory import KvMemory, describe_bytes
from model_runner.largest_step import NUM_BLOCKS, StepBounds, run_largest_step
from model_runner.loading import LoadedModel
from model_runner.models.native import NativeDecoder
from services.config import ModelRunnerSettings
from services.errors import StartupError
from services.graph_setup import graphs_of, why_no_graphs, why_not_captured

_CPU_MEMORY = 1 << 30


def allocate_cache(
    settings: ModelRunnerSettings,
    loaded: LoadedModel,
    memory: KvMemory,
    shape: AttentionShape,
    bounds: StepBounds,
) -> Choice:
    """Chooses the backend with a cache of two blocks, counts what there is room for, and allocates that.

    shape: of the smaller cache. bounds: of steps. Raises StartupError with one sentence.
    """
    device = shape.device
    try:
        choice = choose(order_of(settings.attention_backend, device), shape)
    except ValueError as error:
        raise StartupError(f"--attention-backend: {error}.") from None
    except torch.OutOfMemoryError:
        raise StartupError(f"No memory for attention beside the weights{free_of(device)}.") from None
    num_blocks = _num_blocks(settings, loaded, memory, choice.backend, bounds)
    kind, refused, behind = type(choice.backend), choice.refused, choice.behind
    # What it has of the device goes before the cache comes.
    del choice
    # Afterwards half of the cache may be there.
    free = free_of(device)
    try:
        return Choice(kind(replace(shape, num_blocks=num_blocks)), refused, behind)
    except RuntimeError:
        # What torch says when it gets no memory.
        wanted = describe_bytes(num_blocks * memory.bytes_per_block)
        raise StartupError(
            f"No memory for {num_blocks} KV blocks of {describe_bytes(memory.bytes_per_block)} each, {wanted} in all"
            f"{free}; give fewer by --num-blocks or --kv-cache-memory."
        ) from None


def free_of(device: torch.device) -> str:
    """', where 3 GiB of 24 GiB are free' on a GPU; nothing elsewhere."""
    if device.type != "cuda":
        return ""
    memory = CudaDevice(device)
    memory.start_over()
    return f", where {describe_bytes(memory.free())} of {describe_bytes(memory.total())} are free"


def smallest_shape(
    loaded: LoadedModel, memory: KvMemory, kv_dtype: torch.dtype, device: torch.device
) -> AttentionShape:
    """Of a cache of two blocks without scales."""
    config = loaded.config
    return AttentionShape(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=memory.block_size,
        num_blocks=NUM_BLOCKS,
        kv_dtype=kv_dtype,
        device=device,
        sliding_window=config.sliding_window,
        # The CPU kernels compute in float32 whatever the weights' form is.
        query_dtype=torch.float32 if isinstance(loaded.model, NativeDecoder) else loaded.weights_dtype,
    )


def _num_blocks(
    settings: ModelRunnerSettings,
    loaded: LoadedModel,
    memory: KvMemory,
    backend: AttentionBackend,
    bounds: StepBounds,
) -> int:
    """What --num-blocks says, or what --kv-cache-memory buys, or on a GPU what the largest step leaves."""
    device = backend.shape.device
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_cache_memory is None and device.type == "cuda":
        graphs = None
        if why_no_graphs(settings, loaded.model, backend) is None:
            graphs = graphs_of(settings, loaded.model, backend, bounds.longest)
        executor = TorchExecutor(loaded.model, backend, memory.block_size, device, graphs)
        return blocks_left(settings, memory, measured_step(bounds, executor, CudaDevice(device)))
    try:
        return memory.blocks_for_budget(settings.kv_cache_memory or _CPU_MEMORY)
    except ValueError as error:
        raise StartupError(str(error)) from None


def measured_step(bounds: StepBounds, executor: TorchExecutor, device: Device) -> StepMemory:
    """What the largest step takes of a device beside the graphs, which are captured first: that gives back what torch
    does not use.

    Raises StartupError where it does not fit.
    """

    def work() -> None:
        # What cannot be captured is spoken of when those that serve are.
        why_not_captured(executor)
        run_largest_step(executor, CudaLane(executor.device), bounds)

    try:
        return measure(device, work)
    except torch.OutOfMemoryError:
        raise StartupError(
            f"A step of {bounds.tokens} tokens in {bounds.sequences} sequences does not fit beside the weights: "
            f"{describe_bytes(device.free())} of {describe_bytes(device.total())} are free; lower "
            "--max-batched-tokens or --max-sequences."
        ) from None


def blocks_left(settings: ModelRunnerSettings, memory: KvMemory, step: StepMemory) -> int:
    """Blocks for what the largest step leaves. Raises StartupError where that is none."""
    left = step.left(settings.gpu_memory_utilization)
    try:
        return memory.blocks_for_budget(left)
    except ValueError:
        raise StartupError(
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} leaves {describe_bytes(left)} for K/V, less "
            f"than two blocks of {describe_bytes(memory.bytes_per_block)}: {step.describe()}; raise it, or lower "
            "--max-batched-tokens or --max-sequences."
        ) from None
