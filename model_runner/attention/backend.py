"""The interface of attention over a paged K/V cache: plan once a step, run once a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from model_runner.batch import StepBatch
from model_runner.books import CopyOrder
from model_runner.device_copies import to_device
from model_runner.kv_scales import KvScales


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of the model and of the cache.

    kv_dtype: of the cache. sliding_window: keys seen, the query's own included. logits_soft_cap: scores become
    cap x tanh(score / cap). scales: by what keys and values are divided before they are stored, for a cache of 8 bits.
    query_dtype: of the queries, keys and values that run() gets.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    kv_dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    scales: KvScales | None = None
    query_dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def k_scale(self, layer: int) -> float:
        """What stored keys of a layer are multiplied with; 1 where there are no scales."""
        return 1.0 if self.scales is None else self.scales.keys[layer]

    def v_scale(self, layer: int) -> float:
        """The same of values."""
        return 1.0 if self.scales is None else self.scales.values[layer]

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def first_visible(self, position: int) -> int:
        """The first position whose key a query at `position` sees."""
        return 0 if self.sliding_window is None else max(0, position + 1 - self.sliding_window)


class AttentionBackend(ABC):
    """Owns the physical K/V and attends through block tables. One thread uses it.

    keys and values have one entry for each layer; their layout is the backend's own. They start at zero, because what
    was never written must not be NaN: 0 x NaN would spread.
    """

    name: ClassVar[str]
    batch_invariant: ClassVar[bool] = False
    """Whether a query's result is the same bit by bit in any batch, in any chunks and in any blocks."""
    is_capturable: ClassVar[bool] = False
    """Whether there is plan_replay()."""
    keys: Tensor
    values: Tensor

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @classmethod
    def why_not(cls, shape: AttentionShape) -> str | None:
        """Why there can be no such cache here, in a phrase; None when there can."""
        return cls.why_not_here(shape.device) or cls.why_not_shape(shape)

    @classmethod
    def why_not_here(cls, device: torch.device) -> str | None:
        """What this machine lacks, in a phrase; None when nothing."""
        return None

    @classmethod
    def why_not_shape(cls, shape: AttentionShape) -> str | None:
        """What the kernels don't know of the shape, in a phrase, wherever they run; None when they know it."""
        return None

    @abstractmethod
    def plan(self, batch: StepBatch) -> None:
        """Prepares a step; the batch stays the same until the next plan()."""

    def plan_replay(self, batch: StepBatch) -> None:
        """plan() for a step of one token a sequence whose run() is captured in a graph, or was.

        The batch's tensors, block tables of full width among them, are the same for each step of as many sequences, and
        so is everything else on the device that run() reads.
        """
        raise NotImplementedError(f"{self.name} reads what a graph would not see")

    def gains_from_plan(self, tables: Sequence[Sequence[int]]) -> bool:
        """Whether a step of one token for each of these block tables is worth a plan() that no graph can follow."""
        return False

    @abstractmethod
    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Writes the step's K/V by slot mapping, then attends.

        queries: [T, num_heads, head_dim]; keys, values: [T, num_kv_heads, head_dim]. Returns what queries look like.
        Each query sees the keys of its own sequence up to its own position.
        """

    def copy_blocks(self, copies: Sequence[CopyOrder]) -> None:
        """Copies the first slots of blocks to other blocks, in all layers: all together, as if in order."""
        if not copies:
            return
        columns = to_device(torch.tensor(moves_of(copies), dtype=torch.int64).T.contiguous(), self.shape.device)
        source, target = (columns[0], columns[1]), (columns[2], columns[3])
        for cache in (self.keys, self.values):
            cache[self._slots(cache, *target)] = cache[self._slots(cache, *source)]

    @abstractmethod
    def _slots(self, cache: Tensor, blocks: Tensor, slots: Tensor) -> Any:
        """The index of slots of blocks, int64 [N] each, in all layers."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V together."""
        return self.keys.nbytes + self.values.nbytes

    def poison(self, blocks: Sequence[int]) -> None:
        """Fills blocks with NaN: a test's way to show that nobody reads what was not written."""
        index = torch.tensor(list(blocks), dtype=torch.long, device=self.keys.device)
        for cache in (self.keys, self.values):
            cache[:, index] = float("nan")


def moves_of(copies: Sequence[CopyOrder]) -> list[tuple[int, int, int, int]]:
    """Slots to copy at once, each as block and slot of its source and of its target, for copies that are in order.

    What one order copies from another one's target comes from where that had it; no target comes twice.
    """
    origins: dict[tuple[int, int], tuple[int, int]] = {}
    for copy in copies:
        for slot in range(copy.num_tokens):
            source = copy.source, slot
            origins[copy.target, slot] = origins.get(source, source)
    return [(*source, *target) for target, source in origins.items()]


def stored(new: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """What a cache holds of new K or V: divided by the scale, and in 8 bits the nearest number that there is."""
    if scale != 1:
        new = new.float() / scale
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        new = new.clamp(-limit, limit)
    return new.to(dtype)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores that stay below the cap, should there be one: cap x tanh(score / cap)."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def name_of(dtype: torch.dtype) -> str:
    """'bfloat16' and the like."""
    return str(dtype).removeprefix("torch.")


BFLOAT16_CAPABILITY = (8, 0)


def lacks(device: torch.device, least: tuple[int, int]) -> str | None:
    """What a GPU lacks of a compute capability, in a phrase; None when nothing."""
    has = torch.cuda.get_device_capability(device)
    return f"the GPU is sm{has[0]}{has[1]}, below sm{least[0]}{least[1]}" if has < least else None
