"""Decode steps and prompts over a paged cache, as the parts need them."""

from __future__ import annotations

from random import Random

import torch

from bench.gpu.place import Place
from model_runner.attention import AttentionBackend, AttentionShape
from model_runner.attention.choice import BACKENDS
from model_runner.batch import BatchEntry


def shape_of(place: Place, num_blocks: int, num_layers: int | None = None) -> AttentionShape:
    """The cache of the place's model with so many blocks; of all layers, if not told otherwise."""
    c = place.sizes.model
    return AttentionShape(
        num_layers=c.num_layers if num_layers is None else num_layers,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        block_size=place.block_size,
        num_blocks=num_blocks,
        kv_dtype=place.sizes.dtype,
        device=place.device,
        query_dtype=place.sizes.dtype,
    )


def make(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend of that name and no other. Raises RuntimeError when it can't be had."""
    kind = BACKENDS[name]
    reason = kind.why_not(shape)
    if reason is not None:
        raise RuntimeError(f"not here: {reason}")
    return kind(shape)


def blocks_of(place: Place, length: int) -> int:
    """Blocks of a sequence of so many tokens."""
    return -(-length // place.block_size)


def tables(place: Place, count: int, length: int, *, shuffled: bool) -> list[list[int]]:
    """Block tables of sequences that share nothing; block 0 is the null block."""
    each = blocks_of(place, length)
    blocks = list(range(1, 1 + count * each))
    if shuffled:
        Random(1).shuffle(blocks)
    return [blocks[index * each : (index + 1) * each] for index in range(count)]


def decode_entries(place: Place, count: int, length: int, *, shuffled: bool = True) -> list[BatchEntry]:
    """The next token, the last of `length`, of so many sequences."""
    return [
        BatchEntry([index % place.sizes.model.vocab_size], length - 1, table, 1)
        for index, table in enumerate(tables(place, count, length, shuffled=shuffled))
    ]


def rows(place: Place, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random queries, keys and values of so many tokens."""
    c, draw = place.sizes.model, torch.Generator(place.device).manual_seed(2)

    def random(heads: int) -> torch.Tensor:
        size = (tokens, heads, c.head_dim)
        return torch.randn(size, dtype=place.sizes.dtype, device=place.device, generator=draw)

    return random(c.num_heads), random(c.num_kv_heads), random(c.num_kv_heads)
