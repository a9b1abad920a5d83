"""The interface of attention over a paged K/V cache: plan once a step, run once a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from model_runner.batch import StepBatch
from model_runner.books import CopyOrder


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a backend must know of the model and of the cache. sliding_window: keys seen, the query's own included."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None = None

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads


class AttentionBackend(ABC):
    """Owns the physical K/V and attends through block tables. One thread uses it.

    keys and values have one entry for each layer; their layout is the backend's own. They start at zero, because what
    was never written must not be NaN: 0 x NaN would spread.
    """

    name: ClassVar[str]
    batch_invariant: ClassVar[bool] = False
    """Whether a query's result is the same bit by bit in any batch, in any chunks and in any blocks."""
    keys: Tensor
    values: Tensor

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape

    @abstractmethod
    def plan(self, batch: StepBatch) -> None:
        """Prepares a step; the batch stays the same until the next plan()."""

    @abstractmethod
    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Writes the step's K/V by slot mapping, then attends.

        queries: [T, num_heads, head_dim]; keys, values: [T, num_kv_heads, head_dim]. Returns what queries look like.
        Each query sees the keys of its own sequence up to its own position.
        """

    def copy_blocks(self, copies: Sequence[CopyOrder]) -> None:
        """Copies the first slots of blocks to other blocks, in all layers, in order."""
        for copy in copies:
            for cache in (self.keys, self.values):
                target = self._slots(cache, copy.target, copy.num_tokens)
                target.copy_(self._slots(cache, copy.source, copy.num_tokens))

    @abstractmethod
    def _slots(self, cache: Tensor, block: int, num_tokens: int) -> Tensor:
        """A view of the first `num_tokens` slots of a block, in all layers."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V together."""
        return self.keys.nbytes + self.values.nbytes

    def poison(self, blocks: Sequence[int]) -> None:
        """Fills blocks with NaN: a test's way to show that nobody reads what was not written."""
        index = torch.tensor(list(blocks), dtype=torch.long, device=self.keys.device)
        for cache in (self.keys, self.values):
            cache[:, index] = float("nan")
