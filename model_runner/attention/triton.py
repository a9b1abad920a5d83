"""Attention by our own Triton kernels, for GPUs without a library of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionShape, lacks, name_of
from model_runner.attention.nhd import GpuAttention, why_no_triton
from model_runner.batch import StepBatch
from model_runner.device_copies import to_device

_FP8_CAPABILITY = (8, 9)
_LEAST_CAPABILITY = (8, 0)
"""Triton has no tensor cores of older GPUs."""
_MOST_PARTS = 32
"""In a graph, where all parts that could be have memory and programs."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How attention is cut: rows of queries and keys that a program takes at a time, and keys in a part.

    All are powers of two, rows and keys at least 16, and a part is a multiple of keys. Only single tokens are computed
    in parts. A part's size is fixed, so that a sequence's result does not depend on what is beside it.
    """

    rows: int = 64
    keys: int = 64
    part: int = 512


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Programs of one launch: int32 [tiles] the sequence, and which of its tokens comes first.

    parts: of a sequence's keys, 0 for no cut. part: keys in one.
    """

    sequences: Tensor
    firsts: Tensor
    parts: int
    part: int

    def __len__(self) -> int:
        return len(self.sequences)


class TritonAttention(GpuAttention):
    """Single tokens are computed in parts of their keys that are merged, longer runs of tokens in tiles of rows."""

    name = "triton"
    is_capturable = True

    def __init__(self, shape: AttentionShape, tiling: Tiling | None = None) -> None:
        """The shape must be one that why_not() has nothing against."""
        super().__init__(shape)
        self._tiling = tiling or tiling_for(shape)
        self._batch: StepBatch
        self._single: _Tiles
        self._long: _Tiles
        self._replayed: dict[int, _Tiles] = {}

    @classmethod
    def why_not_here(cls, device: torch.device) -> str | None:
        reason = why_no_triton(device)
        return lacks(device, _LEAST_CAPABILITY) if reason is None and device.type == "cuda" else reason

    @classmethod
    def why_not_shape(cls, shape: AttentionShape) -> str | None:
        if shape.head_dim > 256:
            return f"its kernels hold heads of 256 dimensions at most, not {shape.head_dim}"
        if shape.kv_dtype.itemsize == 1 and shape.device.type == "cuda" and lacks(shape.device, _FP8_CAPABILITY):
            return f"K/V in {name_of(shape.kv_dtype)}: " + (lacks(shape.device, _FP8_CAPABILITY) or "")
        return None

    def plan(self, batch: StepBatch) -> None:
        self._batch = batch
        self._single = self._tiles(batch, 1, lambda count: count == 1)
        self._long = self._tiles(batch, self._tokens_per_tile, lambda count: count > 1)

    def plan_replay(self, batch: StepBatch) -> None:
        """One tile for each sequence, and as many parts as the longest that fits a table can have."""
        self._batch = batch
        self._long = self._tiles(batch, self._tokens_per_tile, lambda count: count > 1)
        size, width = batch.block_tables.shape
        if size not in self._replayed:
            parts, part = self._most_parts(width * self.shape.block_size)
            tiles = self._tiles(batch, 1, lambda count: count == 1)
            self._replayed[size] = replace(tiles, parts=parts if parts > 1 else 0, part=part)
        self._single = self._replayed[size]

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self._write(layer, keys, values, self._batch.slot_mapping)
        queries = _rows(queries)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if len(self._long):
            self._attend(layer, queries, output, self._long, self._tiling.rows)
        if len(self._single):
            self._attend_single(layer, queries, output)
        return output

    def _write(self, layer: int, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
        shape = self.shape
        keys, values = _rows(keys), _rows(values)
        numbers = shape.num_kv_heads * shape.head_dim
        self._kernels.write[(len(keys),)](
            keys,
            values,
            self.keys[layer],
            self.values[layer],
            slot_mapping,
            keys.stride(0),
            values.stride(0),
            shape.k_scale(layer),
            shape.v_scale(layer),
            IS_SCALED=shape.scales is not None,
            LIMIT=torch.finfo(shape.kv_dtype).max if shape.kv_dtype.itemsize == 1 else 0,
            NUMBERS=numbers,
            LANES=_power_of_two(numbers),
        )

    def _attend_single(self, layer: int, queries: Tensor, output: Tensor) -> None:
        """Tokens that come alone: where one part has all keys it is the result, else parts are merged."""
        tiles, shape = self._single, self.shape
        rows = max(16, self._group_rows)
        if tiles.parts == 0:
            self._attend(layer, queries, output, tiles, rows)
            return
        size = (len(tiles), tiles.parts, shape.num_heads)
        parts = torch.empty((*size, shape.head_dim), dtype=torch.float32, device=queries.device)
        sums = torch.empty(size, dtype=torch.float32, device=queries.device)
        self._attend(layer, queries, parts, tiles, rows, sums)
        self._kernels.merge[(len(tiles), shape.num_heads)](
            parts,
            sums,
            output,
            tiles.sequences,
            self._batch.query_offsets,
            tiles.parts,
            shape.num_heads,
            HEAD_DIM=shape.head_dim,
            DIM=_power_of_two(shape.head_dim),
        )

    def _attend(
        self, layer: int, queries: Tensor, output: Tensor, tiles: _Tiles, rows: int, sums: Tensor | None = None
    ) -> None:
        shape, batch, keys = self.shape, self._batch, self.keys[layer]
        self._kernels.attend[(len(tiles), shape.num_kv_heads, max(1, tiles.parts))](
            queries,
            keys,
            self.values[layer],
            output,
            output if sums is None else sums,
            batch.block_tables,
            batch.sequence_lengths,
            batch.query_offsets,
            tiles.sequences,
            tiles.firsts,
            queries.stride(0),
            batch.block_tables.stride(0),
            *keys.stride()[:3],
            shape.num_heads,
            shape.scale * shape.k_scale(layer),
            shape.logits_soft_cap or 1.0,
            shape.v_scale(layer),
            WINDOW=shape.sliding_window or 0,
            HAS_CAP=shape.logits_soft_cap is not None,
            BLOCK_SIZE=shape.block_size,
            HEAD_DIM=shape.head_dim,
            DIM=_power_of_two(shape.head_dim),
            GROUP=shape.group_size,
            GROUP_ROWS=self._group_rows,
            ROWS=rows,
            KEYS=self._tiling.keys,
            PART=tiles.part if tiles.parts else 0,
            COMPUTE=self._kernels.compute_type(queries.dtype),
            # TF32 would keep 10 bits of a float32.
            PRECISION="ieee" if queries.dtype is torch.float32 else "tf32",
            num_warps=4 if rows * shape.head_dim <= 64 * 64 else 8,
            num_stages=2,
        )

    def _tiles(self, batch: StepBatch, tokens: int, is_of_it: Callable[[int], bool]) -> _Tiles:
        """Cuts the sequences whose number of tokens in the step is_of_it into tiles of so many tokens."""
        chosen = [(row, count) for row, count in enumerate(batch.query_lengths) if is_of_it(count)]
        sequences = [row for row, count in chosen for _ in range(0, count, tokens)]
        firsts = [first for _, count in chosen for first in range(0, count, tokens)]
        parts = max((self._parts_of(batch.lengths[row]) for row, _ in chosen), default=0) if tokens == 1 else 0
        device = self.shape.device
        columns = [to_device(torch.tensor(column, dtype=torch.int32), device) for column in (sequences, firsts)]
        return _Tiles(columns[0], columns[1], parts if parts > 1 else 0, self._tiling.part)

    def _parts_of(self, length: int) -> int:
        """Parts of the keys that the last token of a sequence sees, counted from the first key that is read."""
        start = self.shape.first_visible(length - 1) // self._tiling.keys * self._tiling.keys
        return -(-(length - start) // self._tiling.part)

    def _most_parts(self, length: int) -> tuple[int, int]:
        """Parts of any sequence up to this length, at most, and the keys in one."""
        window = self.shape.sliding_window
        # A window can begin at the last key of those that are read together.
        span = length if window is None else min(length, window + self._tiling.keys - 1)
        part = max(self._tiling.part, _power_of_two(-(-span // _MOST_PARTS)))
        return -(-span // part), part

    @property
    def _group_rows(self) -> int:
        return _power_of_two(self.shape.group_size)

    @property
    def _tokens_per_tile(self) -> int:
        return max(1, self._tiling.rows // self._group_rows)


def tiling_for(shape: AttentionShape) -> Tiling:
    """Sizes with which a program's keys and values fit the shared memory of every GPU from Ampere on."""
    numbers = 4 if shape.query_dtype is torch.float32 else 2
    keys = 64 if _power_of_two(shape.head_dim) * numbers <= 256 else 32
    return Tiling(rows=max(64 if shape.head_dim <= 128 else 32, _power_of_two(shape.group_size)), keys=keys)


def _rows(tensor: Tensor) -> Tensor:
    """The same with each token's heads side by side; rows may stay apart from each other."""
    return tensor if tensor.stride()[1:] == (tensor.shape[2], 1) else tensor.contiguous()


def _power_of_two(number: int) -> int:
    """The number rounded up to a power of two."""
    return 1 << (number - 1).bit_length()
