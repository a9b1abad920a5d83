"""Sequences of random contents in a poisoned cache, and what attention in float64 makes of them.

Before each run the whole cache is NaN. So a backend that reads a slot nobody wrote, a block of nobody's, the padding
of a block table or the positions after a query cannot give the right answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_runner.attention import BACKENDS, AttentionBackend, AttentionShape
from model_runner.batch import BatchEntry, pack_batch

Maker = Callable[[AttentionShape], AttentionBackend]
CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Between float32 and float64, for means of values drawn from the standard normal distribution."""
BF16_TOLERANCE = 3e-2
"""bfloat16 has 8 bits: values up to 4 are off by up to 2**-7 each, and so may be the weights and the result."""

HEADS = {"mha": (4, 4), "gqa2": (4, 2), "gqa3": (6, 2), "gqa8": (16, 2), "mqa": (5, 1)}
"""Query heads and KV heads."""


def shape_of(
    heads: str = "gqa2", *, head_dim: int = 64, block_size: int = 16, window: int | None = None, num_layers: int = 2
) -> AttentionShape:
    """A float32 shape; its blocks are counted by the World that uses it."""
    num_heads, num_kv_heads = HEADS[heads]
    return AttentionShape(
        num_layers, num_heads, num_kv_heads, head_dim, block_size, 1, torch.float32, CPU, sliding_window=window
    )


def dense(shape: AttentionShape, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of one sequence in float64, as one square matrix a head: [tokens, num_heads, head_dim]."""
    queries, keys, values = (each.double().transpose(0, 1) for each in (queries, keys, values))
    seen = torch.ones(queries.shape[1], queries.shape[1], dtype=torch.bool).tril()
    if shape.sliding_window is not None:
        seen = seen.triu(1 - shape.sliding_window)
    outputs = []
    for head, query in enumerate(queries):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        scores = query @ keys[kv_head].T / math.sqrt(shape.head_dim)
        if shape.logits_soft_cap is not None:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        weights = torch.exp(scores) * seen
        outputs.append(weights / weights.sum(dim=1, keepdim=True) @ values[kv_head])
    return torch.stack(outputs, dim=1)


@dataclass
class Truth:
    """One sequence: queries, keys and values of all its positions in all layers, its blocks, how far it is computed."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    table: list[int]
    computed: int = 0

    def expected(self, shape: AttentionShape) -> Tensor:
        """[layers, tokens, num_heads, head_dim]"""
        layers = zip(self.queries, self.keys, self.values, strict=True)
        return torch.stack([dense(shape, *layer) for layer in layers])


class World:
    """Sequences with random contents in shuffled blocks of a poisoned cache.

    Three blocks are nobody's, the null block among them; the one with the highest id is the first sequence's first.
    """

    def __init__(self, made_by: str | Maker, shape: AttentionShape, lengths: Sequence[int], *, seed: int = 0) -> None:
        """made_by: a backend's name, or what makes one."""
        draw = torch.Generator().manual_seed(seed)
        widths = [-(-length // shape.block_size) for length in lengths]
        self.shape = replace(shape, num_blocks=sum(widths) + 3)
        order = (torch.randperm(self.shape.num_blocks - 2, generator=draw) + 1).tolist()
        blocks = iter([self.shape.num_blocks - 1, *order])
        self.sequences = [
            Truth(
                self._random(draw, length, shape.num_heads).to(shape.query_dtype),
                self._cacheable(draw, length, [shape.k_scale(layer) for layer in range(shape.num_layers)]),
                self._cacheable(draw, length, [shape.v_scale(layer) for layer in range(shape.num_layers)]),
                [next(blocks) for _ in range(width)],
            )
            for length, width in zip(lengths, widths, strict=True)
        ]
        self.restart(made_by)

    def restart(self, made_by: str | Maker) -> None:
        """An empty, poisoned cache of another backend; nothing is computed."""
        self.backend = (BACKENDS[made_by] if isinstance(made_by, str) else made_by)(self.shape)
        self.backend.poison(range(self.shape.num_blocks))
        for sequence in self.sequences:
            sequence.computed = 0

    def step(self, work: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Computes the next `count` tokens of each (sequence, count): for each [layers, count, num_heads, head_dim]."""
        entries, rows = [], []
        for index, count in work:
            sequence = self.sequences[index]
            entries.append(BatchEntry([0] * count, sequence.computed, sequence.table, True))
            rows.append((sequence, slice(sequence.computed, sequence.computed + count)))
            sequence.computed += count
        self.backend.plan(pack_batch(entries, self.shape.block_size, CPU))
        layers = [
            self.backend.run(
                layer,
                torch.cat([sequence.queries[layer, here] for sequence, here in rows]),
                torch.cat([sequence.keys[layer, here] for sequence, here in rows]),
                torch.cat([sequence.values[layer, here] for sequence, here in rows]),
            )
            for layer in range(self.shape.num_layers)
        ]
        return list(torch.stack(layers).split([count for _, count in work], dim=1))

    def rows(self, steps: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
        """Runs the steps: for each sequence its rows of all of them, [layers, computed, num_heads, head_dim]."""
        found: list[list[Tensor]] = [[] for _ in self.sequences]
        for work in steps:
            for (index, _), output in zip(work, self.step(work), strict=True):
                found[index].append(output)
        return [torch.cat(each, dim=1) if each else torch.empty(0) for each in found]

    def _random(self, draw: torch.Generator, length: int, heads: int) -> Tensor:
        return torch.randn((self.shape.num_layers, length, heads, self.shape.head_dim), generator=draw)

    def _cacheable(self, draw: torch.Generator, length: int, scales: Sequence[float]) -> Tensor:
        """Keys or values that a cache of the shape's dtype holds without rounding, by the scale of each layer."""
        drawn, scale = self._random(draw, length, self.shape.num_kv_heads), torch.tensor(scales)[:, None, None, None]
        return ((drawn / scale).to(self.shape.kv_dtype).float() * scale).to(self.shape.query_dtype)


def assert_near(actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=tolerance)


def mixed(size: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Lengths of five sequences and three steps which, for blocks of `size`, mix all kinds of work.

    0: a prompt in three chunks, the second from inside one block to inside the next but one.
    1: a prompt of exactly one block, then two decode steps, of which the first begins a block.
    2: a whole prompt that ends inside its second block.  3: a prompt of one token.  4: a prompt of one block.
    """
    lengths = [2 * size + 3, size + 2, size + 5, 1, size]
    steps = [
        [(0, size - 3), (1, size)],
        [(2, size + 5), (0, size + 4), (1, 1), (3, 1)],
        [(1, 1), (4, size), (0, 2)],
    ]
    return lengths, steps
