"""A model's weights after some work on them: a source over another one, which knows everything but the numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from model_runner.weights import Grouped, WeightSource


class ReworkedWeights(ABC):
    """A WeightSource over another one; load() says what becomes of a tensor."""

    def __init__(self, weights: WeightSource) -> None:
        self._weights = weights

    @property
    def total_bytes(self) -> int:
        return self._weights.total_bytes

    def names(self) -> Collection[str]:
        return self._weights.names()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._weights.shape_of(self._source(name))

    def bytes_of(self, name: str) -> int:
        return self._weights.bytes_of(self._source(name))

    def file_of(self, name: str) -> Path:
        return self._weights.file_of(self._source(name))

    @abstractmethod
    def load(self, name: str) -> Tensor:
        """The tensor of that name, as it is now, in float32."""

    def load_exact(self, name: str) -> Tensor | Grouped:
        return self.load(name)

    def rope_freq_factors(self) -> Tensor | None:
        return self._weights.rope_freq_factors()

    def files(self) -> list[Path]:
        return self._weights.files()

    def _source(self, name: str) -> str:
        """The tensor of the other source that this one is made of."""
        return name
