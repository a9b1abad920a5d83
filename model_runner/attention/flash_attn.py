"""Attention by FlashAttention's kernels, which read block tables as they are: of the package, or of torch."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionShape, lacks, name_of
from model_runner.attention.nhd import GpuAttention
from model_runner.batch import StepBatch
from model_runner.device_copies import to_device

_LEAST_CAPABILITY = (8, 0)
_UNBOUNDED = -1


@dataclass(frozen=True, slots=True)
class _Step:
    """What all versions are told of a step.

    query_offsets, key_offsets: int32 [S + 1], where each sequence's queries and keys begin. lengths: int32 [S].
    tables: int32 [S, W]. most_queries, most_keys: of one sequence. All masks are aligned to a sequence's end.
    """

    query_offsets: Tensor
    key_offsets: Tensor
    lengths: Tensor
    tables: Tensor
    most_queries: int
    most_keys: int


Call = Callable[[Callable[..., Any], AttentionShape, _Step, Tensor, Tensor, Tensor], Tensor]
"""Calls a version's function for queries [T, heads, head_dim] and caches [blocks, block_size, kv heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Version:
    """A function that attends through block tables, and what it can't.

    page_multiple: of the tokens in a block. tables: the parameter for block tables, which older releases don't have.
    """

    title: str
    module: str
    function: str
    page_multiple: int
    tables: str
    has_soft_cap: bool
    call: Call

    def why_not(self, shape: AttentionShape) -> str | None:
        """What it does not know of the shape, in a phrase."""
        if shape.block_size % self.page_multiple:
            return f"{self.title} reads blocks of multiples of {self.page_multiple} tokens, not of {shape.block_size}"
        if shape.logits_soft_cap is not None and not self.has_soft_cap:
            return f"{self.title} has no soft cap of logits"
        return None

    def load(self) -> Callable[..., Any]:
        """Raises whatever an import of CUDA libraries may raise."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return function


class FlashAttention(GpuAttention):
    """All sequences of a step in one call, whatever each has to do; K/V are written by slot mapping before."""

    name = "flash_attn"

    def __init__(
        self, shape: AttentionShape, version: Version | None = None, function: Callable[..., Any] | None = None
    ) -> None:
        """The shape must be one that why_not() has nothing against. function: stands in for the version's own."""
        super().__init__(shape)
        self._version = version or next(each for each in VERSIONS if _why_not_version(each, shape) is None)
        self._function = function or self._version.load()
        self._batch: StepBatch
        self._step: _Step

    @classmethod
    def why_not(cls, shape: AttentionShape) -> str | None:
        reason = super().why_not(shape)
        if reason is not None:
            return reason
        reasons = [_why_not_version(version, shape) for version in VERSIONS]
        return None if None in reasons else "; ".join(filter(None, reasons))

    @classmethod
    def why_not_here(cls, device: torch.device) -> str | None:
        if device.type != "cuda" or torch.version.hip is not None:
            return f"the device is {device}, and it needs CUDA"
        return lacks(device, _LEAST_CAPABILITY)

    @classmethod
    def why_not_shape(cls, shape: AttentionShape) -> str | None:
        if shape.query_dtype not in (torch.float16, torch.bfloat16) or shape.kv_dtype is not shape.query_dtype:
            if shape.kv_dtype.itemsize == 1:
                # FlashAttention 3 refuses keys of another type than the queries', and version 2 has no 8 bits at all.
                return f"its kernels read K/V in {name_of(shape.kv_dtype)} only for queries that are rounded to it too"
            types = f"queries in {name_of(shape.query_dtype)} over K/V in {name_of(shape.kv_dtype)}"
            return f"its kernels have float16 or bfloat16 for both, not {types}"
        if shape.head_dim > 256 or shape.head_dim % 8:
            return f"its kernels have heads of multiples of 8 up to 256 dimensions, not {shape.head_dim}"
        return None if shape.scales is None else "scales of K/V are for 8 bits, which it has not"

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch
        offsets = torch.tensor((0, *batch.lengths)).cumsum(0, dtype=torch.int32)
        self._step = _Step(
            query_offsets=batch.query_offsets,
            key_offsets=to_device(offsets, self.shape.device),
            lengths=batch.sequence_lengths,
            tables=batch.block_tables,
            most_queries=max(batch.query_lengths),
            most_keys=max(batch.lengths),
        )

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._write(layer, keys, values, self._batch.slot_mapping)
        cached = self.keys[layer], self.values[layer]
        return self._version.call(self._function, self.shape, self._step, queries.contiguous(), *cached)


def _call_3(
    function: Callable[..., Any], shape: AttentionShape, step: _Step, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    output: Tensor = function(
        queries,
        keys,
        values,
        cache_seqlens=step.lengths,
        page_table=step.tables,
        cu_seqlens_q=step.query_offsets,
        max_seqlen_q=step.most_queries,
        softmax_scale=shape.scale,
        causal=True,
        window_size=_window(shape),
        softcap=shape.logits_soft_cap or 0.0,
    )
    return output


def _call_2(
    function: Callable[..., Any], shape: AttentionShape, step: _Step, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    output: Tensor = function(
        queries,
        keys,
        values,
        cu_seqlens_q=step.query_offsets,
        cu_seqlens_k=step.key_offsets,
        max_seqlen_q=step.most_queries,
        max_seqlen_k=step.most_keys,
        softmax_scale=shape.scale,
        causal=True,
        window_size=_window(shape),
        softcap=shape.logits_soft_cap or 0.0,
        block_table=step.tables,
    )
    return output


def _call_torch(
    function: Callable[..., Any], shape: AttentionShape, step: _Step, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    output: Tensor = function(
        queries,
        keys,
        values,
        step.query_offsets,
        step.key_offsets,
        step.most_queries,
        step.most_keys,
        scale=shape.scale,
        window_size=_window(shape),
        enable_gqa=True,
        seqused_k=step.lengths,
        block_table=step.tables,
        # With more, sequences of one query overwrite each other's results.
        num_splits=1,
    )
    return output


def _window(shape: AttentionShape) -> tuple[int, int]:
    """Keys before and behind a query's own."""
    return (_UNBOUNDED if shape.sliding_window is None else shape.sliding_window - 1), 0


VERSIONS = (
    Version("FlashAttention 3", "flash_attn_interface", "flash_attn_with_kvcache", 1, "page_table", True, _call_3),
    Version("FlashAttention 2", "flash_attn", "flash_attn_varlen_func", 256, "block_table", True, _call_2),
    Version("torch's varlen_attn", "torch.nn.attention.varlen", "varlen_attn", 256, "block_table", False, _call_torch),
)
"""Best first."""


def _why_not_version(version: Version, shape: AttentionShape) -> str | None:
    reason = version.why_not(shape)
    if reason is not None:
        return reason
    try:
        function = version.load()
    except ModuleNotFoundError:
        return f"{version.title} is not installed"
    # An import that loads CUDA libraries can fail in any way.
    except Exception as error:
        return f"{version.title} cannot be loaded: {type(error).__name__}: {error}"
    return None if version.tables in inspect.signature(function).parameters else f"{version.title} has no block tables"
