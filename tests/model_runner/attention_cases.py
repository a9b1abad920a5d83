"""The table of cases that every attention backend passes: each pair of values of two properties is in some case."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from model_runner.attention import AttentionShape
from model_runner.kv_scales import KvScales
from tests.model_runner.attention_world import CPU, Maker, World, assert_near, mixed

HEADS = {
    "mha": (2, 2),
    "gqa2": (4, 2),
    "gqa3": (6, 2),
    "gqa4": (4, 1),
    "gqa5": (5, 1),
    "gqa6": (6, 1),
    "gqa7": (7, 1),
    "gqa8": (16, 2),
    "mqa": (9, 1),
}
"""Query heads and KV heads."""


@dataclass(frozen=True, slots=True)
class Types:
    """Dtypes of queries and of the cache, with the cache's scales. tolerance: absolute, for means of values up to 4.

    With scales there are as many layers.
    """

    query: torch.dtype
    kv: torch.dtype
    tolerance: float
    scales: KvScales | None = None


TYPES = {
    "float32": Types(torch.float32, torch.float32, 1e-5),
    # 11 and 8 bits: the weights and the result are rounded to them, the latter down where Triton is interpreted.
    "float16": Types(torch.float16, torch.float16, 5e-3),
    "bfloat16": Types(torch.bfloat16, torch.bfloat16, 4e-2),
    # What is cached needs no rounding here, so the results are exact but for the queries' type.
    "float32 over bfloat16": Types(torch.float32, torch.bfloat16, 3e-2),
    "bfloat16 over fp8": Types(torch.bfloat16, torch.float8_e4m3fn, 4e-2, KvScales((0.5, 0.03), (0.25, 1.7))),
    "float16 over fp8": Types(torch.float16, torch.float8_e4m3fn, 5e-3, KvScales((0.25, 1.5), (2.0, 0.07))),
}

Steps = Sequence[Sequence[tuple[int, int]]]


def _prefill(size: int) -> tuple[list[int], Steps]:
    return [size + 3, 5], [[(0, size + 3), (1, 5)]]


def _chunks(size: int) -> tuple[list[int], Steps]:
    """Three chunks over a cached prefix, the second of which ends inside the next block but one."""
    return [2 * size + 3, size], [[(0, size - 3)], [(0, size + 4), (1, size)], [(0, 2)]]


def _decode(size: int) -> tuple[list[int], Steps]:
    """Of which one begins a block."""
    return [size + 2, 2 * size + 2], [[(0, size - 1), (1, 2 * size)], *[[(0, 1), (1, 1)]] * 2, [(0, 1)]]


def _single_tokens(size: int) -> tuple[list[int], Steps]:
    return [1, 1, 1], [[(0, 1)], [(1, 1), (2, 1)]]


WORK = {"prefill": _prefill, "chunks": _chunks, "decode": _decode, "single": _single_tokens, "mixed": mixed}
"""By the size of a block: the lengths of sequences, and steps of (sequence, tokens)."""

PROPERTIES: dict[str, Sequence[Any]] = {
    "heads": list(HEADS),
    "types": list(TYPES),
    "head_dim": [64, 80, 96, 128, 256],
    "work": list(WORK),
    "block_size": [8, 16, 32, 64],
    "window": [None, 7, 16],
    "cap": [None, 3.0],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A value for each property. window: keys seen; cap: of logits."""

    heads: str
    types: str
    head_dim: int
    work: str
    block_size: int
    window: int | None
    cap: float | None

    def __str__(self) -> str:
        return (
            f"{self.heads}-{self.types.replace(' ', '_')}-d{self.head_dim}-{self.work}-b{self.block_size}"
            f"-w{self.window}-c{self.cap}"
        )

    @property
    def shape(self) -> AttentionShape:
        """Of one layer, or of as many as have scales; its blocks are counted by the World that uses it."""
        types, (num_heads, num_kv_heads) = TYPES[self.types], HEADS[self.heads]
        return AttentionShape(
            num_layers=1 if types.scales is None else len(types.scales.keys),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=1,
            kv_dtype=types.kv,
            device=CPU,
            sliding_window=self.window,
            logits_soft_cap=self.cap,
            scales=types.scales,
            query_dtype=types.query,
        )

    def check(self, made_by: Maker) -> None:
        """Fails when the backend's rows are not those of dense attention in float64."""
        lengths, steps = WORK[self.work](self.block_size)
        world = World(made_by, self.shape, lengths)
        for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
            assert_near(rows, sequence.expected(world.shape), TYPES[self.types].tolerance)


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Each two of its properties, with their values."""
    return set(itertools.combinations(((name, getattr(case, name)) for name in PROPERTIES), 2))


def _pairwise() -> Iterator[Case]:
    """Greedy: each case takes, property by property, the value that makes most pairs which no case has yet."""
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(PROPERTIES, 2)
        for first, second in itertools.product(PROPERTIES[one], PROPERTIES[other])
    }
    while missing:
        # The pair that comes first in the order of the table, so that the table is the same each time.
        chosen = dict(min(missing, key=_order))
        for name, values in PROPERTIES.items():
            if name not in chosen:
                chosen[name] = max(values, key=lambda value, name=name: _gain(missing, chosen, name, value))
        case = Case(**chosen)
        missing -= pairs_of(case)
        yield case


def _order(pair: tuple[tuple[str, Any], ...]) -> list[tuple[int, int]]:
    names = list(PROPERTIES)
    return [(names.index(name), PROPERTIES[name].index(value)) for name, value in pair]


def _gain(missing: set[Any], chosen: dict[str, Any], name: str, value: object) -> int:
    mine = (name, value)
    return sum((mine, each) in missing or (each, mine) in missing for each in chosen.items())


CASES = list(_pairwise())
