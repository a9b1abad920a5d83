"""Decode steps as CUDA graphs: captured once for each padded number of sequences, then replayed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runner.attention import AttentionBackend
from model_runner.batch import BatchEntry, StepBatch, pack_batch
from model_runner.models.decoder import Decoder

MOST_SEQUENCES = 256
"""Larger steps keep a GPU busy without graphs."""
_PADDING = BatchEntry([0], 0, [0], num_logits=1)
"""A token that nobody sees, in the null block."""

Replay = Callable[[], Tensor]
"""Computes again what was captured, from what its tensors hold now: the same output tensor each time."""
Capture = Callable[[Callable[[], Tensor]], Replay]
Pack = Callable[[Sequence[BatchEntry]], StepBatch]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the batch whose tensors it reads."""

    batch: StepBatch
    replay: Replay


class DecodeGraphs:
    """Runs steps in which each sequence has one token. One thread uses it.

    A size is captured by capture_all() or by its first step. Each step is copied to the tensors that its size was
    captured with, planned, and replayed.
    """

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend,
        max_sequences: int,
        table_width: int,
        capture: Capture | None = None,
    ) -> None:
        """backend: one that is_capturable. table_width: blocks of the longest sequence. capture: by CUDA if None."""
        self._model = model
        self._backend = backend
        self._table_width = table_width
        self._capture = capture or CudaCapture()
        self._sizes = padded_sizes(min(max_sequences, MOST_SEQUENCES))
        self._captured: dict[int, _Captured] = {}

    def takes(self, entries: Sequence[BatchEntry]) -> bool:
        """Whether a step is one that graphs are made for."""
        return (
            len(entries) <= self._sizes[-1]
            and all(
                len(entry.token_ids) == 1 and entry.num_logits == 1 and len(entry.block_table) <= self._table_width
                for entry in entries
            )
            and not self._backend.gains_from_plan([entry.block_table for entry in entries])
        )

    def capture_all(self) -> None:
        """Captures each size by a step of padding, the largest first: its memory is the others' too."""
        for size in reversed(self._sizes):
            self.execute([_PADDING] * size)

    def describe(self) -> str:
        """For the log."""
        return f"{len(self._sizes)} sizes of decode steps, up to {self._sizes[-1]} sequences"

    def execute(self, entries: Sequence[BatchEntry], pack: Pack | None = None) -> Tensor:
        """Logits of a step that it takes: float32 [entries, vocabulary], which the next step overwrites.

        pack: by pack_batch() if None.
        """
        size = self._sizes[bisect_left(self._sizes, len(entries))]
        padded = [*entries, *[_PADDING] * (size - len(entries))]
        shape = self._backend.shape
        step = pack(padded) if pack else pack_batch(padded, shape.block_size, shape.device)
        if size not in self._captured:
            self._captured[size] = self._captured_with(_widened(step, self._table_width))
        captured = self._captured[size]
        self._backend.plan_replay(_copied(step, captured.batch))
        return captured.replay()[: len(entries)]

    def _captured_with(self, batch: StepBatch) -> _Captured:
        self._backend.plan_replay(batch)
        return _Captured(batch, self._capture(lambda: self._model.compute(batch, self._backend)))


def padded_sizes(max_sequences: int) -> list[int]:
    """Powers of two to 8, then multiples of 8, up to the first that has room for max_sequences."""
    sizes = [size for size in (1, 2, 4) if size < max_sequences]
    return [*sizes, *range(8, max_sequences + 8, 8)] if max_sequences > 4 else [*sizes, max_sequences]


class CudaCapture:
    """Captures on one stream of its own; all graphs have one pool of memory, for no two run at a time.

    cuBLAS keeps a workspace for each stream that ever used it, so graphs that were computed on streams of their own
    would keep one each.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        """Computes once before, which compiles kernels and allocates what they keep."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = compute()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def _widened(step: StepBatch, width: int) -> StepBatch:
    """The same with tables that have room for the longest sequence."""
    tables = step.block_tables.new_zeros(len(step.block_tables), width)
    tables[:, : step.block_tables.shape[1]] = step.block_tables
    return replace(step, block_tables=tables)


def _copied(step: StepBatch, to: StepBatch) -> StepBatch:
    """The step in the tensors of another. What is behind a sequence's last block stays from before: nobody reads it."""
    for source, target in (
        (step.token_ids, to.token_ids),
        (step.positions, to.positions),
        (step.slot_mapping, to.slot_mapping),
        (step.sequence_lengths, to.sequence_lengths),
        (step.block_tables, to.block_tables[:, : step.block_tables.shape[1]]),
    ):
        target.copy_(source, non_blocking=True)
    return replace(to, lengths=step.lengths, host_tables=step.host_tables)
