"""CUDA graphs of a runner: whether it has them, and their capture before it serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_runner.attention import AttentionBackend
from model_runner.decode_graphs import Capture, DecodeGraphs
from model_runner.executor import TorchExecutor
from model_runner.models.decoder import Decoder
from model_runner.models.native import NativeDecoder
from services.config import ModelRunnerSettings
from services.errors import StartupError

_LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class Prepared:
    """An executor, and the line at start that says of its graphs what there is to say."""

    executor: TorchExecutor
    graphs: str


def prepared_executor(
    settings: ModelRunnerSettings,
    model: Decoder | NativeDecoder,
    backend: AttentionBackend,
    longest: int,
    capture: Capture | None = None,
) -> Prepared:
    """An executor with all its graphs captured, or without any and why.

    longest: tokens of the longest sequence. capture: by CUDA if None. Raises StartupError where --cuda-graphs insists
    on what cannot be had, and where there is no memory for graphs.
    """
    device = backend.shape.device
    reason = why_no_graphs(settings, model, backend)
    if reason is None:
        graphs = graphs_of(settings, model, backend, longest, capture)
        executor = TorchExecutor(model, backend, settings.block_size, device, graphs)
        try:
            reason = why_not_captured(executor)
        except torch.OutOfMemoryError:
            raise StartupError(
                "No memory for CUDA graphs beside the weights and K/V; lower --gpu-memory-utilization, "
                "--kv-cache-memory or --num-blocks, or give --no-cuda-graphs."
            ) from None
        if reason is None:
            return Prepared(executor, f"on: {graphs.describe()}")
    if settings.cuda_graphs:
        raise StartupError(f"--cuda-graphs cannot be had: {reason}.")
    return Prepared(TorchExecutor(model, backend, settings.block_size, device), f"off: {reason}")


def why_no_graphs(
    settings: ModelRunnerSettings, model: Decoder | NativeDecoder, backend: AttentionBackend
) -> str | None:
    """What is against graphs before any is tried, in a phrase; None when nothing is."""
    device = backend.shape.device
    if settings.cuda_graphs is False:
        return "--no-cuda-graphs"
    if device.type != "cuda" or isinstance(model, NativeDecoder):
        return f"the device is {device}"
    return None if backend.is_capturable else f"{backend.name} attention reads what a graph would not see"


def graphs_of(
    settings: ModelRunnerSettings,
    model: Decoder | NativeDecoder,
    backend: AttentionBackend,
    longest: int,
    capture: Capture | None = None,
) -> DecodeGraphs:
    """Graphs that are not captured yet, of a model and backend that why_no_graphs() has nothing against."""
    assert isinstance(model, Decoder)
    width = -(-longest // settings.block_size)
    return DecodeGraphs(model, backend, settings.max_sequences, width, capture)


def why_not_captured(executor: TorchExecutor) -> str | None:
    """Captures all graphs; what goes wrong, in a phrase. Raises torch.OutOfMemoryError."""
    try:
        executor.capture_graphs()
    except torch.OutOfMemoryError:
        raise
    # Whatever CUDA and its libraries have against it means the same here: kernels are launched one by one.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"their capture failed: {type(error).__name__}: {lines[0][:_LONGEST_REASON]}"
    return None
