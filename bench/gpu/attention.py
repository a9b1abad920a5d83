"""Speed of a backend's attention alone, one layer of the model: decode, prefill, and what paging costs decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.counts import causal_attention_flops, decode_bytes, kv_bytes_per_token
from bench.gpu.paged import blocks_of, decode_entries, make, rows, shape_of, tables
from bench.gpu.place import Place
from model_runner.attention import AttentionBackend
from model_runner.batch import BatchEntry, pack_batch

COLD_BYTES = 512 << 20
"""More than any GPU of now has caches for."""


def attention(place: Place, backend: str) -> Iterator[dict[str, object]]:
    """By batch: microseconds and GB/s of decode, and with paging_overhead how much longer it takes than torch's
    attention over contiguous K/V, and than the same kernels over blocks that lie in order; TFLOP/s of prefill.

    After each of them.
    """
    decode: dict[str, dict[str, float]] = {}
    figures: dict[str, object] = {"decode": decode}
    for batch in place.sizes.batches:
        decode[str(batch)] = _decode(place, backend, batch)
        yield figures
    yield figures | {"prefill": _prefill(place, backend)}


def layers_of(place: Place, batch: int) -> int:
    """Layers of K/V that calls go through in turn, as a model does: with one, a small batch would lie in the cache of
    the GPU, and look faster than its memory."""
    c, sizes = place.sizes.model, place.sizes
    layer = kv_bytes_per_token(c, sizes.dtype.itemsize, layers=1) * sizes.context * batch
    return max(1, min(c.num_layers, -(-COLD_BYTES // layer)))


@torch.inference_mode()
def _decode(place: Place, name: str, batch: int) -> dict[str, float]:
    sizes, layers = place.sizes, layers_of(place, batch)
    new = rows(place, batch)
    took = _paged_seconds(place, name, batch, layers, new)
    contiguous = place.time(in_turn(layers, contiguous_decode(place, batch, new[0], layers)))
    moved = decode_bytes(sizes.model, [sizes.context] * batch, sizes.dtype.itemsize)
    return {
        "us": 1e6 * took[True],
        "bytes": moved,
        "gb_s": moved / took[True] / 1e9,
        "us_blocks_in_order": 1e6 * took[False],
        "us_contiguous": 1e6 * contiguous,
        "overhead_of_order": took[True] / took[False] - 1,
        "overhead_of_paging": took[True] / contiguous - 1,
    }


def _paged_seconds(
    place: Place, name: str, batch: int, layers: int, new: tuple[Tensor, Tensor, Tensor]
) -> dict[bool, float]:
    """Of a call, over blocks that are shuffled, and over those that lie in order."""
    context = place.sizes.context
    backend = make(name, shape_of(place, 1 + batch * blocks_of(place, context), layers))
    took = {}
    for shuffled in (True, False):
        entries = decode_entries(place, batch, context, shuffled=shuffled)
        backend.plan(pack_batch(entries, place.block_size, place.device))
        took[shuffled] = place.time(in_turn(layers, lambda layer: backend.run(layer, *new)))
    return took


def in_turn(layers: int, call: Callable[[int], object]) -> Callable[[], object]:
    """The call for layer after layer, again and again."""
    turns = cycle(range(layers))
    return lambda: call(next(turns))


def contiguous_decode(place: Place, batch: int, queries: Tensor, layers: int) -> Callable[[int], Tensor]:
    """torch's attention of one query each, [batch, heads, head_dim], over a layer's K/V that lie side by side."""
    c = place.sizes.model
    size = (layers, batch, c.num_kv_heads, place.sizes.context, c.head_dim)
    keys, values = (torch.zeros(size, dtype=place.sizes.dtype, device=place.device) for _ in range(2))

    def attend(layer: int) -> Tensor:
        return functional.scaled_dot_product_attention(queries[:, :, None], keys[layer], values[layer], enable_gqa=True)

    return attend


@torch.inference_mode()
def _prefill(place: Place, name: str) -> dict[str, float]:
    c, length = place.sizes.model, place.sizes.prefill
    backend: AttentionBackend = make(name, shape_of(place, 1 + blocks_of(place, length), num_layers=1))
    entry = BatchEntry([0] * length, 0, tables(place, 1, length, shuffled=True)[0], 1)
    backend.plan(pack_batch([entry], place.block_size, place.device))
    took = place.time(partial(backend.run, 0, *rows(place, length)))
    flops = causal_attention_flops(c.num_heads, c.head_dim, length)
    return {"tokens": length, "ms": 1e3 * took, "flops": flops, "tflop_s": flops / took / 1e12}
