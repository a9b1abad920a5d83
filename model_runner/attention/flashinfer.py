"""Attention by FlashInfer's kernels: planned once a step on the host, run once a layer."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import BFLOAT16_CAPABILITY, AttentionShape, lacks, name_of, stored
from model_runner.attention.nhd import GpuAttention
from model_runner.attention.pages import Pages, num_common_blocks, num_shared_blocks, pages_of, prefix_pages
from model_runner.batch import StepBatch
from model_runner.device_copies import CudaLane, Mark, to_device

WORKSPACE_BYTES = 256 << 20
"""For the partial results of sequences that are cut; FlashInfer says when a plan wants more."""
HEAD_DIMS = (64, 128, 256)
"""Those that append_paged_kv_cache has."""
GROUP_SIZES = (1, 2, 3, 4, 6, 8, 16)
"""Query heads of a KV head that the decode kernels without tensor cores have."""
CASCADE_SEQUENCES = 4
CASCADE_TOKENS = 512
"""From so many sequences and shared tokens on, a shared prefix is read once for all."""
CASCADE_INSTEAD_OF_GRAPH = 8 << 30
"""Bytes of K/V that need not be read, from which on it is worth launching a step's kernels one by one: milliseconds."""
_LEAST_CAPABILITY = (7, 5)

Cache = tuple[Tensor, Tensor]
Run = Callable[..., Tensor]
"""Attends as it was planned: run(queries, (keys, values)), with k_scale and v_scale where K/V have scales."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of the step that are computed by one plan."""

    rows: slice
    run: Run


@dataclass(frozen=True, slots=True)
class _Append:
    """Where a step's K/V go, on the device, int32: for each token its sequence and position, and all pages."""

    sequences: Tensor
    positions: Tensor
    indices: Tensor
    indptr: Tensor
    last_page_len: Tensor


@dataclass(frozen=True, slots=True)
class _Replayed:
    """What a graph reads of a number of sequences: the wrapper copies each plan to the tensors of `append`."""

    wrapper: Any
    append: _Append


class FlashInferAttention(GpuAttention):
    """A step begins with its single tokens, which the decode kernels take; all that follows is prefill's.

    plan() gets lengths from the host and never waits for the device. One plan serves all layers, and each layer's
    scales of K/V are numbers on the host that run() gets: a graph keeps them with the layer's launches.
    """

    name = "flashinfer"
    is_capturable = True

    def __init__(self, shape: AttentionShape, api: Any = None, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        """The shape must be one that why_not() has nothing against. api: stands in for the package."""
        super().__init__(shape)
        self._api = api or importlib.import_module("flashinfer")
        # FlashInfer wants zeros at first. The wrappers share it: they run one after the other.
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=shape.device)
        self._decode = self._decode_wrapper()
        self._prefill = self._api.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        # FlashInfer has a wrapper for such levels, whose run() takes no scales.
        self._prefix = self._api.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._own = self._api.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._replayed: dict[int, _Replayed] = {}
        self._parts: list[_Part] = []
        self._append: _Append
        self._planned: Mark | None = None
        """When the latest plan has come to the device."""

    @classmethod
    def why_not_here(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"the device is {device}, and it needs CUDA"
        if importlib.util.find_spec("flashinfer") is None:
            return "it is not installed (pip install 'octavo[gpu]')"
        return lacks(device, _LEAST_CAPABILITY) or _import_error()

    @classmethod
    def why_not_shape(cls, shape: AttentionShape) -> str | None:
        if shape.query_dtype not in (torch.float16, torch.bfloat16):
            return f"its kernels have no queries in {name_of(shape.query_dtype)}"
        if shape.kv_dtype not in (shape.query_dtype, torch.float8_e4m3fn):
            return f"its kernels have no {name_of(shape.kv_dtype)} K/V for queries in {name_of(shape.query_dtype)}"
        if shape.head_dim not in HEAD_DIMS:
            return f"its kernels have heads of {', '.join(map(str, HEAD_DIMS))} dimensions, not {shape.head_dim}"
        is_cuda = shape.device.type == "cuda"
        return lacks(shape.device, BFLOAT16_CAPABILITY) if is_cuda and shape.query_dtype is torch.bfloat16 else None

    def plan(self, batch: StepBatch) -> None:
        self._await_plan()
        self._append = self._plan_append(batch)
        num_decoded = next(
            (row for row, count in enumerate(batch.query_lengths) if count > 1), len(batch.query_lengths)
        )
        self._parts = []
        if num_decoded:
            run = self._plan_decode(batch, slice(0, num_decoded))
            self._parts.append(_Part(slice(0, num_decoded), run))
        if num_decoded < len(batch.query_lengths):
            pages = pages_of(batch, slice(num_decoded, None), self.shape.block_size)
            run = self._plan_prefill(self._prefill, pages, causal=True)
            self._parts.append(_Part(slice(num_decoded, None), run))
        self._note_plan()

    def plan_replay(self, batch: StepBatch) -> None:
        self._await_plan()
        sequences, width = batch.block_tables.shape
        if sequences not in self._replayed:
            self._replayed[sequences] = self._replayed_of(sequences, width)
        replayed = self._replayed[sequences]
        self._append = replayed.append
        replayed.append.positions.copy_(batch.positions)
        pages = pages_of(batch, slice(None), self.shape.block_size)
        self._parts = [_Part(slice(None), self._plan_wrapper(replayed.wrapper, pages))]
        self._note_plan()

    def gains_from_plan(self, tables: Sequence[Sequence[int]]) -> bool:
        """Only plan() has a shared prefix read once for all: a gain when it is long or has many sequences."""
        if self.shape.sliding_window is not None or len(tables) < CASCADE_SEQUENCES:
            return False
        saved = (len(tables) - 1) * num_common_blocks(tables) * self.cache_bytes // self.shape.num_blocks
        return saved >= CASCADE_INSTEAD_OF_GRAPH

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape, append = self.shape, self._append
        cached = (self.keys[layer], self.values[layer])
        self._api.append_paged_kv_cache(
            stored(keys, shape.k_scale(layer), shape.kv_dtype),
            stored(values, shape.v_scale(layer), shape.kv_dtype),
            append.sequences,
            append.positions,
            cached,
            append.indices,
            append.indptr,
            append.last_page_len,
            kv_layout="NHD",
        )
        queries = queries.contiguous()
        scales = {} if shape.scales is None else {"k_scale": shape.k_scale(layer), "v_scale": shape.v_scale(layer)}
        outputs = [part.run(queries[part.rows], cached, **scales) for part in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _plan_append(self, batch: StepBatch) -> _Append:
        pages = pages_of(batch, slice(None), self.shape.block_size)
        counts = pages.query_indptr.diff()
        sequences = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)
        return _Append(
            sequences=self._on_device(sequences),
            positions=batch.positions.int(),
            indices=self._on_device(pages.indices),
            indptr=self._on_device(pages.indptr),
            last_page_len=self._on_device(pages.last_page_len),
        )

    def _plan_decode(self, batch: StepBatch, sequences: slice) -> Run:
        shared = self._shared_blocks(batch, sequences)
        if shared:
            return self._plan_cascade(batch, sequences, shared)
        return self._plan_wrapper(self._decode, pages_of(batch, sequences, self.shape.block_size))

    def _plan_wrapper(self, wrapper: Any, pages: Pages) -> Run:
        wrapper.plan(
            self._locked(pages.indptr),
            self._on_device(pages.indices),
            self._locked(pages.last_page_len),
            *self._sizes,
            **self._options(),
        )
        run: Run = wrapper.run
        return run

    def _plan_prefill(self, wrapper: Any, pages: Pages, *, causal: bool) -> Run:
        wrapper.plan(
            self._locked(pages.query_indptr),
            self._locked(pages.indptr),
            self._on_device(pages.indices),
            self._locked(pages.last_page_len),
            *self._sizes,
            causal=causal,
            **self._options(),
        )
        run: Run = wrapper.run
        return run

    def _plan_cascade(self, batch: StepBatch, sequences: slice, shared: int) -> Run:
        """The shared blocks are read once for all queries, then each sequence's own; both results are merged."""
        size, merge = self.shape.block_size, self._api.merge_state
        prefix = self._plan_prefill(self._prefix, prefix_pages(batch, sequences, size, shared), causal=False)
        own = self._plan_prefill(self._own, pages_of(batch, sequences, size, shared), causal=True)

        def run(queries: Tensor, cached: Cache, **scales: float) -> Tensor:
            parts = [each(queries, cached, return_lse=True, **scales) for each in (prefix, own)]
            merged: Tensor = merge(*parts[0], *parts[1])[0]
            return merged

        return run

    def _shared_blocks(self, batch: StepBatch, sequences: slice) -> int:
        """Blocks of a shared prefix, where reading them once is worth a second kernel, else 0."""
        # A window's end would be counted from the end of each level.
        if self.shape.sliding_window is not None or sequences.stop < CASCADE_SEQUENCES:
            return 0
        shared = num_shared_blocks(batch, sequences, self.shape.block_size)
        return shared if shared * self.shape.block_size >= CASCADE_TOKENS else 0

    def _decode_wrapper(self, **options: Any) -> Any:
        # Its own choice can be cuDNN, whose plan reads the pages on the host, which would wait for the device.
        return self._api.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=wants_tensor_cores(self.shape), backend="fa2", **options
        )

    def _replayed_of(self, sequences: int, width: int) -> _Replayed:
        """Tensors for steps of so many sequences, each with `width` pages at most."""

        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=self.shape.device)

        append = _Append(
            sequences=torch.arange(sequences, dtype=torch.int32, device=self.shape.device),
            positions=ints(sequences),
            indices=ints(sequences * width),
            indptr=ints(sequences + 1),
            last_page_len=ints(sequences),
        )
        wrapper = self._decode_wrapper(
            use_cuda_graph=True,
            paged_kv_indptr_buffer=append.indptr,
            paged_kv_indices_buffer=append.indices,
            paged_kv_last_page_len_buffer=append.last_page_len,
        )
        return _Replayed(wrapper, append)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """What every plan is told first: query heads, KV heads, dimensions of a head, tokens in a page."""
        return self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim, self.shape.block_size

    def _options(self) -> dict[str, Any]:
        """What every plan is told last. The data types have defaults of FlashInfer's own, which are not ours."""
        shape = self.shape
        return {
            "sm_scale": shape.scale,
            "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
            "logits_soft_cap": shape.logits_soft_cap,
            "q_data_type": shape.query_dtype,
            "kv_data_type": shape.kv_dtype,
        }

    def _on_device(self, tensor: Tensor) -> Tensor:
        return to_device(tensor, self.shape.device)

    def _locked(self, tensor: Tensor) -> Tensor:
        """The tensor on the host, where a plan reads it; and copies it to the device, which nobody waits for."""
        return tensor.pin_memory() if self.shape.device.type == "cuda" else tensor

    def _await_plan(self) -> None:
        """FlashInfer's plans lie in page-locked memory that the next plan writes: the last one must be copied first."""
        if self._planned is not None:
            self._planned.wait()
            self._planned = None

    def _note_plan(self) -> None:
        if self.shape.device.type == "cuda":
            self._planned = CudaLane(self.shape.device).mark()


def wants_tensor_cores(shape: AttentionShape) -> bool:
    """Whether decode goes by the prefill kernels: they know any group, and win where a KV head has many queries."""
    return shape.group_size >= 4 or shape.group_size not in GROUP_SIZES or shape.kv_dtype.itemsize == 1


@cache
def _import_error() -> str | None:
    """Why FlashInfer cannot be imported, which takes seconds: tried once, and only where all else is there."""
    try:
        importlib.import_module("flashinfer")
    # Its modules compile and load libraries while they are imported: anything can come out of that.
    except Exception as error:
        return f"its import failed: {type(error).__name__}: {error}"
    return None
