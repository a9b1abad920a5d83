"""Whole decode steps of the random model, each with a draw: with and without CUDA graphs, and tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from bench.gpu.counts import decode_bytes, num_parameters
from bench.gpu.paged import blocks_of, decode_entries, make, shape_of
from bench.gpu.place import Place
from bench.gpu.random_model import random_model
from model_runner.attention import AttentionBackend
from model_runner.batch import BatchEntry
from model_runner.decode_graphs import DecodeGraphs
from model_runner.executor import TorchExecutor
from model_runner.kv_memory import describe_bytes
from model_runner.loading import LoadedModel
from model_runner.models.decoder import Decoder
from model_runner.request import SamplingParams
from model_runner.sampling import sample
from model_runner.sampling_rows import SamplingRows

SPARE = 0.9
"""Of the free memory of a GPU, what a cache may take."""


def steps(place: Place, backend: str) -> Iterator[dict[str, object]]:
    """By batch: milliseconds of a step, tokens per second, and the bytes that a step must read, per second.

    After each batch. With one too many to fit, the batch is as large as fits, and so named.
    """
    loaded = random_model(place.sizes.model, place.sizes.dtype, place.device)
    figures: dict[str, object] = {}
    for wanted in place.sizes.batches:
        batch = min(wanted, _most(place))
        if not batch or str(batch) in figures:
            figures[str(wanted)] = {"skipped": f"{_free(place)} are free, too few for {wanted} such sequences"}
        else:
            figures[str(batch)] = _batch(place, loaded, backend, batch)
        if place.is_gpu:
            torch.cuda.empty_cache()
        yield figures


def _batch(place: Place, loaded: LoadedModel, name: str, batch: int) -> dict[str, object]:
    sizes = place.sizes
    width = blocks_of(place, sizes.context)
    backend = make(name, shape_of(place, 1 + batch * width))
    entries = decode_entries(place, batch, sizes.context)
    model = loaded.model
    assert isinstance(model, Decoder), "random weights make a plain decoder"
    plain = TorchExecutor(model, backend, place.block_size, place.device)
    took = place.time(step_of(plain, entries))
    read = num_parameters(sizes.model) * sizes.dtype.itemsize
    read += sizes.model.num_layers * decode_bytes(sizes.model, [sizes.context] * batch, sizes.dtype.itemsize)
    figures: dict[str, object] = {
        "ms": 1e3 * took,
        "tokens_s": batch / took,
        "bytes": read,
        "gb_s": read / took / 1e9,
    }
    return figures | _with_graphs(place, model, backend, entries, width)


def _with_graphs(
    place: Place, model: Decoder, backend: AttentionBackend, entries: Sequence[BatchEntry], width: int
) -> dict[str, object]:
    if not place.is_gpu:
        return {"graphs": f"skipped: there are none on {place.device}"}
    if not backend.is_capturable:
        return {"graphs": f"skipped: {backend.name} has none"}
    try:
        graphs = DecodeGraphs(model, backend, len(entries), width)
        took = place.time(step_of(TorchExecutor(model, backend, place.block_size, place.device, graphs), entries))
    # Whatever breaks here, the figures without graphs stay.
    except Exception as error:
        return {"graphs": f"failed: {type(error).__name__}: {error}"[:300]}
    return {"ms_graphs": 1e3 * took, "tokens_s_graphs": len(entries) / took}


def step_of(executor: TorchExecutor, entries: Sequence[BatchEntry]) -> Callable[[], object]:
    """A step as the engine takes it: the model, a greedy draw for each sequence, and the tokens on the host."""
    count = len(entries)
    greedy = SamplingRows.of([SamplingParams(temperature=0.0)] * count, [0] * count, [0] * count)
    return partial(_step, executor, entries, greedy)


def _step(executor: TorchExecutor, entries: Sequence[BatchEntry], greedy: SamplingRows) -> list[int]:
    drawn: list[int] = sample(executor.execute(entries, []), greedy).tolist()
    return drawn


def _most(place: Place) -> int:
    """Sequences of `context` tokens whose K/V fits."""
    if not place.is_gpu:
        return max(place.sizes.batches)
    c, size = place.sizes.model, place.sizes.dtype.itemsize
    each = blocks_of(place, place.sizes.context) * place.block_size * 2 * c.num_layers * c.num_kv_heads * c.head_dim
    return int(SPARE * torch.cuda.mem_get_info(place.device)[0]) // (each * size)


def _free(place: Place) -> str:
    return str(describe_bytes(torch.cuda.mem_get_info(place.device)[0])) if place.is_gpu else "some"
