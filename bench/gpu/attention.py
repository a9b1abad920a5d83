"""Speed of a backend's attention alone, one layer of the model: decode, prefill, and what paging costs decode."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu.counts import causal_attention_flops, decode_bytes
from bench.gpu.paged import blocks_of, decode_entries, make, rows, shape_of, tables
from bench.gpu.place import Place
from model_runner.attention import AttentionBackend
from model_runner.batch import BatchEntry, pack_batch


@torch.inference_mode()
def attention(place: Place, backend: str) -> dict[str, object]:
    """By batch: microseconds and GB/s of decode, and with paging_overhead how much longer it takes than torch's
    attention over contiguous K/V, and than the same kernels over blocks that lie in order; TFLOP/s of prefill."""
    return {
        "decode": {str(batch): _decode(place, backend, batch) for batch in place.sizes.batches},
        "prefill": _prefill(place, backend),
    }


def _decode(place: Place, name: str, batch: int) -> dict[str, float]:
    sizes = place.sizes
    backend = make(name, shape_of(place, 1 + batch * blocks_of(place, sizes.context), num_layers=1))
    new = rows(place, batch)
    took = {}
    for shuffled in (True, False):
        entries = decode_entries(place, batch, sizes.context, shuffled=shuffled)
        backend.plan(pack_batch(entries, place.block_size, place.device))
        took[shuffled] = place.time(partial(backend.run, 0, *new))
    del backend
    contiguous = place.time(contiguous_decode(place, batch, new[0]))
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


def contiguous_decode(place: Place, batch: int, queries: Tensor) -> partial[Tensor]:
    """torch's attention of one query each, [batch, heads, head_dim], over K/V that lie side by side."""
    c = place.sizes.model
    size = (batch, c.num_kv_heads, place.sizes.context, c.head_dim)
    keys, values = (torch.zeros(size, dtype=place.sizes.dtype, device=place.device) for _ in range(2))
    return partial(functional.scaled_dot_product_attention, queries[:, :, None], keys, values, enable_gqa=True)


def _prefill(place: Place, name: str) -> dict[str, float]:
    c, length = place.sizes.model, place.sizes.prefill
    backend: AttentionBackend = make(name, shape_of(place, 1 + blocks_of(place, length), num_layers=1))
    entry = BatchEntry([0] * length, 0, tables(place, 1, length, shuffled=True)[0], 1)
    backend.plan(pack_batch([entry], place.block_size, place.device))
    took = place.time(partial(backend.run, 0, *rows(place, length)))
    flops = causal_attention_flops(c.num_heads, c.head_dim, length)
    return {"tokens": length, "ms": 1e3 * took, "flops": flops, "tflop_s": flops / took / 1e12}
