"""Runs the model on the physical cache: what the engine's thread calls once a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from model_runner.attention import AttentionBackend
from model_runner.batch import BatchEntry, StepBatch, fill_followers, pack_batch
from model_runner.books import CopyOrder
from model_runner.decode_graphs import DecodeGraphs, Pack
from model_runner.device_copies import Send
from model_runner.models.decoder import Decoder
from model_runner.models.native import NativeDecoder


class TorchExecutor:
    """A decoder and the attention backend that owns its K/V; graphs: of both, for the steps that they take."""

    def __init__(
        self,
        model: Decoder | NativeDecoder,
        backend: AttentionBackend,
        block_size: int,
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._block_size = block_size
        self._device = device
        self._graphs = graphs

    @property
    def device(self) -> torch.device:
        return self._device

    def execute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder]) -> Tensor:
        """Copies blocks, then computes the entries: float32 logits [rows that they want, vocabulary], in order."""
        return self._compute(entries, copies, lambda each: pack_batch(each, self._block_size, self._device))

    def follow(
        self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder], tokens: Tensor | None, send: Send
    ) -> Tensor:
        """execute() with the tokens that entries follow, int64 [R] on the device; waits for nothing that it sends."""

        def pack(each: Sequence[BatchEntry]) -> StepBatch:
            batch = pack_batch(each, self._block_size, self._device, send)
            if tokens is not None:
                fill_followers(batch, each, tokens, send)
            return batch

        return self._compute(entries, copies, pack)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures all graphs now, should there be any. Raises what CUDA raises."""
        with current(self._device):
            if self._graphs is not None:
                self._graphs.capture_all()

    @torch.inference_mode()
    def _compute(self, entries: Sequence[BatchEntry], copies: Sequence[CopyOrder], pack: Pack) -> Tensor:
        with current(self._device):
            if copies:
                self._backend.copy_blocks(copies)
            if self._graphs is not None and self._graphs.takes(entries):
                return self._graphs.execute(entries, pack)
            return self._model.forward(pack(entries), self._backend)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on a thread's current GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
