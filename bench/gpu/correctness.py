"""Whether a backend is right on this device: small steps against the reference, in shapes that serve real models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

import torch

from bench.gpu.paged import shape_of
from bench.gpu.place import Place
from model_runner.attention import AttentionShape
from model_runner.attention.choice import BACKENDS
from model_runner.attention.trial import SCALES, why_broken

_HEADS = ((8, 8), (8, 4), (6, 2), (8, 2), (8, 1), (32, 8))
"""Query heads and KV heads."""
_DIMS = (64, 80, 96, 128, 256)
_BLOCKS = (8, 16, 32, 64)


def correctness(place: Place, backend: str) -> Iterator[dict[str, object]]:
    """Whether the served model's own shape is right: what the other parts measure."""
    yield from _checked(backend, [shape_of(place, 6, num_layers=1)])


def shapes(place: Place, backend: str) -> Iterator[dict[str, object]]:
    """The same of that shape with each property varied, for which most kernels are compiled for the first time."""
    yield from _checked(backend, _varied(place))


def _checked(backend: str, given: Iterable[AttentionShape]) -> Iterator[dict[str, object]]:
    """How many shapes are right, which can't be had and which are wrong, each with the reason. ok: none is wrong.

    After each shape: there may be no time for all.
    """
    right = 0
    refused: dict[str, str] = {}
    wrong: dict[str, str] = {}
    kind = BACKENDS[backend]
    for shape in given:
        name, reason = _name(shape), kind.why_not(shape)
        if reason is not None:
            refused[name] = reason
        elif (reason := why_broken(kind, shape)) is not None:
            wrong[name] = reason
        else:
            right += 1
        yield {"ok": right > 0 and not wrong, "right": right, "refused": refused, "wrong": wrong}


def _varied(place: Place) -> Iterator[AttentionShape]:
    own = shape_of(place, 6, num_layers=1)
    types = _types(place)
    for number, (heads, dim) in enumerate(product(_HEADS, _DIMS)):
        query, kv = types[number % len(types)]
        size = _BLOCKS[number % len(_BLOCKS)]
        shape = replace(own, num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, block_size=size)
        yield replace(shape, query_dtype=query, kv_dtype=kv, scales=SCALES if kv.itemsize == 1 else None)
    yield replace(own, sliding_window=5)
    yield replace(own, logits_soft_cap=30.0)


def _types(place: Place) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """Types of queries and of the cache."""
    if not place.is_gpu:
        return ((torch.float32, torch.float32),)
    half, brain, eight = torch.float16, torch.bfloat16, torch.float8_e4m3fn
    return ((brain, brain), (half, half), (brain, eight))


def _name(shape: AttentionShape) -> str:
    query, kv = (str(each).removeprefix("torch.") for each in (shape.query_dtype, shape.kv_dtype))
    name = f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, blocks of {shape.block_size}, {query}"
    name += f" over {kv}" if kv != query else ""
    name += f", window {shape.sliding_window}" if shape.sliding_window else ""
    return name + (f", cap {shape.logits_soft_cap:g}" if shape.logits_soft_cap else "")
