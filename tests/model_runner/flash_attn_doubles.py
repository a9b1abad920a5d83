"""Doubles of FlashAttention 2 and 3 and of torch's varlen_attn: each call does what its documentation says."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from torch.nn.attention import varlen

from tests.model_runner.gpu_doubles import Cache, attend, bound_to, checked


def _flash(
    q: Tensor,
    caches: Cache,
    offsets: Tensor,
    lengths: list[int],
    tables: Tensor,
    scale: float | None,
    window: tuple[int, int],
    cap: float,
) -> Tensor:
    """Causal, and aligned to the end of each sequence, whose keys are in the blocks of its row of the tables."""
    assert q.dtype == caches[0].dtype == caches[1].dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert offsets.dtype == tables.dtype == torch.int32
    outputs = []
    for row, length in enumerate(lengths):
        keys, values = (each[tables[row].long()].flatten(0, 1)[:length] for each in caches)
        here = q[offsets[row] : offsets[row + 1]]
        outputs.append(attend(here, keys, values, scale or q.shape[-1] ** -0.5, True, window[0], cap)[0])
    return torch.cat(outputs).to(q.dtype)


@checked("flash_attn_interface", "flash_attn_with_kvcache")
def flash_attn_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    assert causal
    assert cache_seqlens.dtype == torch.int32
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    lengths = cache_seqlens.tolist()
    return _flash(q, (k_cache, v_cache), cu_seqlens_q, lengths, page_table, softmax_scale, window_size, softcap)


@checked("flash_attn", "flash_attn_varlen_func")
def flash_attn_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    block_table: Tensor | None = None,
) -> Tensor:
    assert causal
    assert block_table is not None
    assert k.shape[1] % 256 == 0
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff().tolist()
    assert (max_seqlen_q, max_seqlen_k) == (cu_seqlens_q.diff().max(), max(lengths))
    return _flash(q, (k, v), cu_seqlens_q, lengths, block_table, softmax_scale, window_size, softcap)


@bound_to(inspect.signature(varlen.varlen_attn))
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None = None,
) -> Tensor:
    """torch.nn.attention.varlen's: a window of (n, 0) is causal."""
    assert key.shape[1] % 256 == 0
    assert window_size[1] == 0
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert num_splits == 1
    assert seqused_k.tolist() == cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (cu_seq_q.diff().max(), seqused_k.max())
    return _flash(query, (key, value), cu_seq_q, seqused_k.tolist(), block_table, scale, window_size, 0.0)
