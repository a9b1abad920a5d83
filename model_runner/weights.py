"""Tensors by the names that Hugging Face checkpoints give them, and the safetensors files that hold them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_runner.errors import ModelLoadError
from model_runner.json_file import read_object

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Grouped:
    """A matrix as whole numbers in groups of 32 inputs: weight = scale x number + offset, without any rounding.

    form: int4, where numbers are 0 to 15, or int8, which has no offsets. numbers: int8 [outputs, inputs]; scales and
    offsets: float16 [outputs, inputs / 32].
    """

    form: str
    numbers: Tensor
    scales: Tensor
    offsets: Tensor | None

    def dequantized(self) -> Tensor:
        """float32 [outputs, inputs]"""
        groups = self.numbers.view(*self.scales.shape, -1).float() * self.scales.float()[..., None]
        if self.offsets is not None:
            groups += self.offsets.float()[..., None]
        return groups.view(self.numbers.shape)

    def rows(self, chosen: slice) -> Grouped:
        """The weights of some outputs."""
        offsets = None if self.offsets is None else self.offsets[chosen]
        return Grouped(self.form, self.numbers[chosen], self.scales[chosen], offsets)


class WeightSource(Protocol):
    """Where a decoder takes its weights from. Names are such as 'model.layers.0.self_attn.q_proj.weight'."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        ...

    def names(self) -> Collection[str]: ...

    def shape_of(self, name: str) -> tuple[int, ...]: ...

    def bytes_of(self, name: str) -> int:
        """Bytes of one tensor as it is stored."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that one tensor is in."""
        ...

    def load(self, name: str) -> Tensor:
        """The tensor on the CPU, in a floating-point dtype. Raises ModelLoadError when it is missing."""
        ...

    def load_exact(self, name: str) -> Tensor | Grouped:
        """The tensor in a form as small as it is stored in, where there is one with the same values; else load()."""
        ...

    def rope_freq_factors(self) -> Tensor | None:
        """Float32 [head_dim / 2], by which rotary frequencies are divided; None when the config tells it all."""
        ...

    def files(self) -> list[Path]:
        """The files that the tensors are in."""
        ...


class SafetensorsWeights:
    """The tensors of a directory: of model.safetensors, or of the shards that its index lists; memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Opens all files and reads their headers. Raises ModelLoadError."""
        shards = _shards(path)
        handles = {shard: _open(shard) for shard in dict.fromkeys(shards.values())} if shards else {}
        if not shards:
            handles = {path / _SINGLE: _open(path / _SINGLE)}
            shards = dict.fromkeys(handles[path / _SINGLE].keys(), path / _SINGLE)
        self._directory = path
        self._handles = handles
        self._shards = shards
        self._tensors = {name: self._describe(name) for name in shards}

    @property
    def total_bytes(self) -> int:
        return sum(map(self.bytes_of, self._tensors))

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][0]

    def bytes_of(self, name: str) -> int:
        shape, dtype = self._tensors[name]
        return prod(shape) * dtype.itemsize

    def file_of(self, name: str) -> Path:
        return self._shards[name]

    def load(self, name: str) -> Tensor:
        if name not in self._shards:
            raise ModelLoadError(f"{self._directory} has no tensor {name}.")
        shard = self._shards[name]
        try:
            return self._handles[shard].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"{shard}: the tensor {name} cannot be read: {_one_line(error)}.") from None

    def load_exact(self, name: str) -> Tensor | Grouped:
        return self.load(name)

    def rope_freq_factors(self) -> Tensor | None:
        return None

    def files(self) -> list[Path]:
        return list(self._handles)

    def _describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        shard = self._shards[name]
        try:
            found = self._handles[shard].get_slice(name)
        except SafetensorError:
            raise ModelLoadError(f"{shard} has no tensor {name}, which the index says is there.") from None
        dtype = _DTYPES.get(found.get_dtype())
        if dtype is None:
            raise ModelLoadError(
                f"{shard}: the tensor {name} is of type {found.get_dtype()}; {', '.join(_DTYPES)} are supported."
            )
        return tuple(found.get_shape()), dtype


def _shards(path: Path) -> Mapping[str, Path]:
    """Which file each tensor is in, from the index; empty when there is no index or no need of it."""
    index = path / _INDEX
    if (path / _SINGLE).exists() or not index.exists():
        return {}
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
        raise ModelLoadError(f"{index}: weight_map should say the file of each tensor.")
    for file in dict.fromkeys(listed.values()):
        if Path(file).name != file:
            raise ModelLoadError(f"{index}: the shard {file!r} is not in the directory of the index.")
        if not (path / file).exists():
            raise ModelLoadError(f"{index} lists the shard {file}, which does not exist.")
    return {name: path / file for name, file in listed.items()}


def _open(file: Path) -> Any:
    if not file.exists():
        raise ModelLoadError(f"{file.parent} has neither {_SINGLE} nor {_INDEX}.")
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelLoadError(f"{file} cannot be read as safetensors: {_one_line(error)}.") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
