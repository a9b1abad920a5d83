"""A double of FlashInfer in plain torch: each call does what its documentation says.

A call is bound to the signature that was recorded of the real function, and refused where the real one is documented,
or was seen in its sources, to refuse it or to read something else than was meant.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.model_runner.record_signatures import signature_from

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "gpu_signatures.json").read_text())
LOG2_E = 1.4426950408889634
Cache = tuple[Tensor, Tensor]


def checked(package: str, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Binds each call to what was recorded of a package's function."""
    return bound_to(signature_from(RECORDED[package][name]))


def recorded(package: str, name: str) -> Callable[..., Any]:
    """A function that does nothing and has a recorded signature."""
    function: Callable[..., Any] = eval(f"lambda {RECORDED[package][name]}: None")
    return function


def bound_to(signature: inspect.Signature) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Binds each call to a signature, before it goes on with what was bound."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            return function(**bound.arguments)

        return call

    return wrap


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool, window_left: int, cap: float
) -> tuple[Tensor, Tensor]:
    """One sequence: queries [q, heads, dim] over keys and values [k, kv heads, dim].

    The mask is aligned to the end. A query sees window_left keys before its own, or all for -1. Returns float32
    [q, heads, dim] and the base-2 logarithms of the sums of exponentials, float32 [q, heads].
    """
    group = queries.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(group, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    position = torch.arange(len(keys) - len(queries), len(keys))[:, None]
    key = torch.arange(len(keys))[None, :]
    hidden = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    if causal:
        hidden |= key > position
    if window_left >= 0:
        hidden |= key < position - window_left
    scores = scores.masked_fill(hidden, float("-inf"))
    sums = scores.logsumexp(dim=-1)
    output = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)
    return output, sums.T * LOG2_E


def merge(out: Tensor, sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of the keys of the same queries, sums in base 2, become one."""
    both = torch.stack([sums, other_sums])
    weights = torch.exp2(both - both.max(dim=0).values)
    merged = (weights[0, ..., None] * out + weights[1, ..., None] * other) / weights.sum(dim=0)[..., None]
    return merged, torch.log2(weights.sum(dim=0)) + both.max(dim=0).values


@dataclass(frozen=True, slots=True)
class Plan:
    """What plan() was told; queries and pages of a sequence are between the offsets."""

    query_indptr: list[int]
    indptr: list[int]
    indices: Tensor
    last_page_len: list[int]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    causal: bool
    options: dict[str, Any]


def planned(
    query_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    sizes: Sequence[int],
    causal: bool,
    options: dict[str, Any],
) -> Plan:
    """Refuses what FlashInfer takes for something else without a word: other integers, pages that hold no token."""
    for each in (query_indptr, indptr, indices, last_page_len):
        assert each.dtype == torch.int32
        assert each.dim() == 1
    assert len(query_indptr) == len(indptr) == len(last_page_len) + 1
    assert query_indptr[0] == indptr[0] == 0
    assert indptr[-1] == len(indices)
    assert (indptr.diff() > 0).all()
    num_qo_heads, num_kv_heads, head_dim, page_size = sizes
    assert num_qo_heads % num_kv_heads == 0
    assert head_dim in (64, 128, 256)
    assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
    options = {"q_data_type": torch.float16, "window_left": -1, "logits_soft_cap": None, "sm_scale": None} | options
    return Plan(
        query_indptr.tolist(), indptr.tolist(), indices, last_page_len.tolist(), *sizes, causal=causal, options=options
    )


def run_plan(
    plan: Plan, queries: Tensor, cache: Cache, k_scale: float | None, v_scale: float | None
) -> tuple[Tensor, Tensor]:
    """All sequences of a plan, in the queries' dtype, with their sums.

    k_scale is multiplied into the plan's scale, before the cap; v_scale with the result, once that is rounded.
    """
    options = plan.options
    assert queries.is_contiguous()
    assert queries.dtype == options["q_data_type"]
    assert queries.shape == (plan.query_indptr[-1], plan.num_qo_heads, plan.head_dim)
    for each in cache:
        assert each.dtype == (options.get("kv_data_type") or options["q_data_type"])
        assert each.shape[1:] == (plan.page_size, plan.num_kv_heads, plan.head_dim)
    for scale in (k_scale, v_scale):
        # A tensor is one number for each head, or is read by the host.
        assert scale is None or isinstance(scale, float)
    rows = [_run_sequence(plan, row, queries, cache, k_scale or 1.0) for row in range(len(plan.indptr) - 1)]
    outputs, sums = zip(*rows, strict=True)
    return torch.cat(outputs).to(queries.dtype) * (v_scale or 1.0), torch.cat(sums)


def _run_sequence(plan: Plan, row: int, queries: Tensor, cache: Cache, k_scale: float) -> tuple[Tensor, Tensor]:
    options = plan.options
    pages = plan.indices[plan.indptr[row] : plan.indptr[row + 1]].long()
    length = (len(pages) - 1) * plan.page_size + plan.last_page_len[row]
    keys, values = (each[pages].flatten(0, 1)[:length] for each in cache)
    scale = (options["sm_scale"] or plan.head_dim**-0.5) * k_scale
    here = queries[plan.query_indptr[row] : plan.query_indptr[row + 1]]
    return attend(here, keys, values, scale, plan.causal, options["window_left"], options["logits_soft_cap"] or 0.0)


def _check_workspace(workspace: Tensor, kv_layout: str) -> None:
    assert workspace.dtype == torch.uint8
    assert not workspace.any()
    assert kv_layout == "NHD"


class _Decode:
    """With use_cuda_graph, plan() copies to the buffers that were given, and run() reads nothing else of the plan."""

    @checked("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.__init__")
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        _check_workspace(float_workspace_buffer, kv_layout)
        self._use_tensor_cores = use_tensor_cores
        self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        self._is_fixed = use_cuda_graph
        if use_cuda_graph:
            indptr, indices, last_page_len = self._buffers
            assert indptr is not None
            assert indices is not None
            assert last_page_len is not None
            assert len(indptr) == len(last_page_len) + 1

    @checked("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.plan")
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        if not self._use_tensor_cores and num_qo_heads // num_kv_heads not in (1, 2, 3, 4, 6, 8, 16):
            raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
        pages = (indptr, indices, last_page_len)
        if self._is_fixed:
            pages = self._in_buffers(*pages)
        self._rest = ((num_qo_heads, num_kv_heads, head_dim, page_size), False, options)
        self._pages = pages
        self._planned()

    @checked("flashinfer", "BatchDecodeWithPagedKVCacheWrapper.run")
    def run(
        self, q: Tensor, paged_kv_cache: Cache, k_scale: float | None = None, v_scale: float | None = None
    ) -> Tensor:
        return run_plan(self._planned(), q, paged_kv_cache, k_scale, v_scale)[0]

    def _planned(self) -> Plan:
        indptr, indices, last_page_len = self._pages
        one_query_each = torch.arange(len(indptr), dtype=torch.int32)
        return planned(one_query_each, indptr, indices[: indptr[-1]], last_page_len, *self._rest)

    def _in_buffers(self, *pages: Tensor) -> Any:
        _, indices, last_page_len = self._buffers
        assert len(pages[2]) == len(last_page_len)
        assert len(pages[1]) <= len(indices)
        for buffer, given in zip(self._buffers, pages, strict=True):
            buffer[: len(given)].copy_(given)
        return self._buffers


class _Prefill:
    @checked("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.__init__")
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        _check_workspace(float_workspace_buffer, kv_layout)

    @checked("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.plan")
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        sizes = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan = planned(qo_indptr, *pages, sizes, causal, options)

    @checked("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.run")
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Cache,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        output, sums = run_plan(self._plan, q, paged_kv_cache, k_scale, v_scale)
        return (output, sums) if return_lse else output


@checked("flashinfer", "merge_state")
def _merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    assert v_a.shape == v_b.shape
    assert s_a.shape == s_b.shape == v_a.shape[:2]
    assert s_a.dtype == s_b.dtype == torch.float32
    merged, sums = merge(v_a.float(), s_a, v_b.float(), s_b)
    return merged.to(v_a.dtype), sums


@checked("flashinfer", "append_paged_kv_cache")
def _append(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Cache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """The pages must have room for what is appended. What is given is read as numbers of the cache's dtype."""
    assert kv_layout == "NHD"
    for each in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len):
        assert each.dtype == torch.int32
    page_size = paged_kv_cache[0].shape[1]
    for cache, new in zip(paged_kv_cache, (append_key, append_value), strict=True):
        assert new.dtype == cache.dtype
        assert new.stride(-1) == 1
        assert cache.shape[-1] in (64, 128, 256)
        for row, (sequence, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
            pages = kv_indices[kv_indptr[sequence] : kv_indptr[sequence + 1]]
            assert position < (len(pages) - 1) * page_size + kv_last_page_len[sequence]
            cache[pages[position // page_size], position % page_size] = new[row]


@checked("flashinfer", "sampling_from_probs")
def _sample(probs: Tensor, *, seed: int, offset: int) -> Tensor:
    """Each row's number u is of (0, 1], and made of seed, offset and the row's place. The token is the first whose
    probability is above 0 and brings the sum above u; the last of those above 0 where float32 adds up to less."""
    assert probs.dtype == torch.float32
    assert probs.is_contiguous()
    assert probs.isfinite().all()
    assert 0 <= seed < 2**63
    numbers = torch.rand(len(probs), generator=torch.Generator().manual_seed(seed + offset), dtype=torch.float64)
    reached = probs.double().cumsum(dim=1) > 1 - numbers.unsqueeze(1)
    last = probs.shape[1] - 1 - (probs > 0).flip(1).int().argmax(dim=1)
    return torch.where(reached.any(dim=1), reached.int().argmax(dim=1), last).int()


@checked("flashinfer", "top_p_renorm_probs")
def _top_p_renorm(probs: Tensor, top_p: Tensor) -> Tensor:
    """Keeps all that are as likely as the token at which the likeliest ones add up to the share top_p, or likelier."""
    assert probs.dtype == top_p.dtype == torch.float32
    assert top_p.shape == probs.shape[:1]
    assert probs.is_contiguous()
    assert ((top_p > 0) & (top_p <= 1)).all()
    likeliest = probs.sort(dim=1, descending=True).values
    reached = likeliest.cumsum(dim=1) >= top_p.unsqueeze(1) * probs.sum(dim=1, keepdim=True)
    # float32 may add up to less than the share: then it keeps all.
    reached[:, -1] = True
    threshold = likeliest.gather(1, reached.int().argmax(dim=1, keepdim=True))
    kept = probs * (probs >= threshold)
    return kept / kept.sum(dim=1, keepdim=True)


flashinfer = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=_Decode,
    BatchPrefillWithPagedKVCacheWrapper=_Prefill,
    merge_state=_merge_state,
    append_paged_kv_cache=_append,
    sampling_from_probs=_sample,
    top_p_renorm_probs=_top_p_renorm,
)
