"""A trial of a backend before it gets its memory: a small step against the reference, where kernels may be broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from model_runner.attention.backend import AttentionBackend, AttentionShape
from model_runner.attention.reference import ReferenceAttention
from model_runner.batch import BatchEntry, StepBatch, pack_batch
from model_runner.kv_scales import KvScales

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Between two ways to sum values of the normal distribution, by the dtype of queries."""
SCALES = KvScales((0.05,), (0.25,))
"""For the numbers of a trial, where K/V have any: with a model's own they could all become 0 or the largest number."""
_LONGEST_REASON = 200
_LONG = 80
"""Blocks, of 8 tokens or more."""
_RUN = 96
"""Tokens of a prompt: for more than 64 FlashInfer has other kernels on Hopper, compiled when they are first wanted."""
_SHARED, _SHARING = 512, 4
"""Tokens that some sequences share, from which on FlashInfer reads them once for all and merges."""
_FIRST_FREE = 6
"""The first block that the steps of short sequences leave alone."""


@torch.inference_mode()
def why_broken(make: Callable[[AttentionShape], AttentionBackend], shape: AttentionShape) -> str | None:
    """What a backend made for a small cache of this shape does wrong, in a phrase; None when nothing.

    This also compiles what it will need. It can take minutes, and it can raise nothing.
    """
    num_blocks = _FIRST_FREE + max(_SHARING, -(-_RUN // shape.block_size))
    small = replace(shape, num_layers=1, num_blocks=num_blocks, scales=None if shape.scales is None else SCALES)
    try:
        backend, reference = make(small), ReferenceAttention(small)
        off = max(_difference(backend, reference, batch, small) for batch in _steps(small))
    # Compilers, loaders and kernels fail in ways of their own, and all of them mean the same here.
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"its trial failed: {type(error).__name__}: {lines[0][:_LONGEST_REASON]}"
    tolerance = _TOLERANCES.get(shape.query_dtype, _TOLERANCES[torch.bfloat16])
    # A NaN is not within any tolerance.
    return None if off <= tolerance else f"its trial gave results that are off by {off:.3g}"


def _steps(shape: AttentionShape) -> list[StepBatch]:
    """Two prompts, of which one goes on in its second block; then a token of one and a chunk of the other.

    Then a token that sees two blocks again and again, so that kernels which cut long sequences do so; a prompt that is
    not short; and single tokens behind much that they share.
    """
    size = shape.block_size
    first = [BatchEntry([0] * (size + 1), 0, [1, 5], True), BatchEntry([0] * 3, 0, [2, 4], True)]
    second = [BatchEntry([0], size + 1, [1, 5], True), BatchEntry([0] * size, 3, [2, 4], True)]
    third = [BatchEntry([0], _LONG * size, [1, 5] * _LONG, True)]
    run = [BatchEntry([0] * _RUN, 0, range(_FIRST_FREE, shape.num_blocks), True)]
    prefix = [1, 5] * -(-_SHARED // (2 * size))
    sharing = [BatchEntry([0], len(prefix) * size, [*prefix, _FIRST_FREE + row], True) for row in range(_SHARING)]
    return [pack_batch(entries, size, shape.device) for entries in (first, second, third, run, sharing)]


def _difference(
    backend: AttentionBackend, reference: AttentionBackend, batch: StepBatch, shape: AttentionShape
) -> float:
    """The largest between what both make of a step of random numbers."""
    draw = torch.Generator().manual_seed(len(batch.token_ids))

    def random(heads: int) -> Tensor:
        numbers = torch.randn(len(batch.token_ids), heads, shape.head_dim, generator=draw)
        return numbers.to(shape.device, shape.query_dtype)

    rows = random(shape.num_heads), random(shape.num_kv_heads), random(shape.num_kv_heads)
    outputs = []
    for each in (backend, reference):
        each.plan(batch)
        outputs.append(each.run(0, *rows).float())
    return float((outputs[0] - outputs[1]).abs().max())
