"""The doubles of FlashInfer and FlashAttention against cases written by hand, and what was recorded of the packages."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model_runner import flash_attn_doubles
from tests.model_runner.gpu_doubles import RECORDED, flashinfer, merge
from tests.model_runner.record_signatures import flashinfer_signatures

HALF = torch.float16
DIM = 64
WORKSPACE = torch.zeros(16, dtype=torch.uint8)
UNIT = torch.zeros(DIM).index_fill_(0, torch.tensor(0), 1.0)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def pages_of_two() -> tuple[Tensor, Tensor]:
    """Five pages of two tokens: page 4 and the first slot of page 1 are a sequence of three tokens, the rest is NaN.

    Its keys give a query of query() the scores ln 3, 0 and 0; its values are 8, 4 and 1.
    """
    keys, values = torch.full((2, 5, 2, 1, DIM), float("nan"), dtype=HALF)
    for (page, slot), key, value in (((4, 0), 1, 8), ((4, 1), 0, 4), ((1, 0), 0, 1)):
        keys[page, slot, 0], values[page, slot, 0] = key * UNIT, value * UNIT
    return keys, values


def query(count: int = 1) -> Tensor:
    """Scores are divided by 8, the root of 64 dimensions."""
    return (8 * math.log(3) * UNIT).to(HALF).expand(count, 1, DIM).contiguous()


def first(rows: Tensor) -> list[float]:
    """The first components of one head; the others are 0."""
    assert not rows[..., 1:].any()
    return rows[:, 0, 0].tolist()


def near(*numbers: float) -> Any:
    return pytest.approx(list(numbers), abs=5e-3)


SIZES = (1, 1, DIM, 2)


class TestFlashInfer:
    def test_decode(self) -> None:
        """(3 x 8 + 4 + 1) / 5 = 5.8; and a sequence of page 4 alone: (3 x 8 + 4) / 4 = 7."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        wrapper.plan(ints(0, 2, 3), ints(4, 1, 4), ints(1, 2), *SIZES, q_data_type=HALF)
        assert first(wrapper.run(query(2), pages_of_two())) == near(5.8, 7)

    def test_a_window_counts_the_keys_before_the_query(self) -> None:
        """One before: (4 + 1) / 2 = 2.5."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        wrapper.plan(ints(0, 2), ints(4, 1), ints(1), *SIZES, q_data_type=HALF, window_left=1)
        assert first(wrapper.run(query(), pages_of_two())) == near(2.5)

    def test_a_soft_cap(self) -> None:
        """The first score, ln 3, becomes tanh(ln 3) = 0.8: its weight is e**0.8 = 2.2255 to 1 to 1."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        wrapper.plan(ints(0, 2), ints(4, 1), ints(1), *SIZES, q_data_type=HALF, logits_soft_cap=1.0)
        assert first(wrapper.run(query(), pages_of_two())) == near((2.2255 * 8 + 4 + 1) / 4.2255)

    def test_prefill_is_aligned_to_the_end(self) -> None:
        """Two queries are at positions 1 and 2 of three: 7 and 5.8; without causality 5.8 twice."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        pages = (ints(0, 2), ints(0, 2), ints(4, 1), ints(1))
        wrapper.plan(*pages, *SIZES, causal=True, q_data_type=HALF)
        assert first(wrapper.run(query(2), pages_of_two())) == near(7, 5.8)
        wrapper.plan(*pages, *SIZES, q_data_type=HALF)
        assert first(wrapper.run(query(2), pages_of_two())) == near(5.8, 5.8)

    def test_sums_are_of_base_2(self) -> None:
        """The weights 3, 1 and 1 are 5, which is 2 to the power of 2.3219."""
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        wrapper.plan(ints(0, 1), ints(0, 2), ints(4, 1), ints(1), *SIZES, causal=True, q_data_type=HALF)
        _, sums = wrapper.run(query(), pages_of_two(), return_lse=True)
        assert sums.tolist() == [near(2.3219)]

    def test_merging(self) -> None:
        """Means of 6 and 2 with the sums 2**2 and 2**1 are one mean of (4 x 6 + 2 x 2) / 6, with the sum 6."""
        rows, sums = merge(torch.full((1, 1, 1), 6.0), ints(2)[None], torch.full((1, 1, 1), 2.0), ints(1)[None])
        assert rows.item() == pytest.approx(28 / 6)
        assert sums.item() == pytest.approx(math.log2(6))

    def test_merging_two_results(self) -> None:
        """Page 4 of a sequence, 7 with the sum 4, and the first slot of page 1, 1 with the sum 1: all three are 5.8."""
        parts = []
        for page, length in ((4, 2), (1, 1)):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD")
            wrapper.plan(ints(0, 1), ints(0, 1), ints(page), ints(length), *SIZES, q_data_type=HALF)
            parts += wrapper.run(query(), pages_of_two(), return_lse=True)
        rows, sums = flashinfer.merge_state(*parts)
        assert first(rows) == near(5.8)
        assert sums.tolist() == [near(2.3219)]

    @pytest.mark.parametrize("kind", ["decode", "prefill"])
    def test_scales(self, kind: str) -> None:
        """Scores of 2 ln 3, 0 and 0 weigh 9, 1 and 1; half of the mean is (9 x 8 + 4 + 1) / 11 / 2 = 3.5."""
        pages = (ints(0, 2), ints(4, 1), ints(1))
        if kind == "decode":
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
            wrapper.plan(*pages, *SIZES, q_data_type=HALF, sm_scale=1 / 8)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD")
            wrapper.plan(ints(0, 1), *pages, *SIZES, q_data_type=HALF, sm_scale=1 / 8)
        assert first(wrapper.run(query(), pages_of_two(), k_scale=2.0, v_scale=0.5)) == near(3.5)

    def test_a_cap_is_for_scores_with_their_scale(self) -> None:
        """ln 3 x 2 becomes tanh(ln 9) = 80 / 82: its weight is e**0.9756 = 2.6528 to 1 to 1."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        wrapper.plan(ints(0, 2), ints(4, 1), ints(1), *SIZES, q_data_type=HALF, logits_soft_cap=1.0)
        rows = wrapper.run(query(), pages_of_two(), k_scale=2.0)
        assert first(rows) == near((2.6528 * 8 + 4 + 1) / 4.6528)

    def test_append(self) -> None:
        """Tokens 1 and 2 of a sequence on pages 3 and 0, and token 0 of another on page 2."""
        cache = tuple(torch.zeros(2, 4, 2, 1, DIM, dtype=HALF))
        new = torch.arange(1, 4, dtype=HALF)[:, None, None].repeat(1, 1, DIM)
        pages = (ints(3, 0, 2), ints(0, 2, 3), ints(1, 1))
        flashinfer.append_paged_kv_cache(new, 10 * new, ints(0, 0, 1), ints(1, 2, 0), cache, *pages, kv_layout="NHD")
        for each, factor in zip(cache, (1, 10), strict=True):
            written = {(3, 1): 1, (0, 0): 2, (2, 0): 3}
            for page in range(4):
                for slot in range(2):
                    assert (each[page, slot] == factor * written.get((page, slot), 0)).all()

    def test_a_group_that_the_cuda_cores_do_not_have(self) -> None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        with pytest.raises(RuntimeError, match="Unsupported group_size: 7"):
            wrapper.plan(ints(0, 1), ints(4), ints(1), 7, 1, DIM, 2, q_data_type=HALF)

    @pytest.mark.parametrize("wrong", ["positional", "unknown", "long last page", "empty last page", "int64"])
    def test_wrong_calls_are_refused(self, wrong: str) -> None:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        last = {"long last page": ints(3), "empty last page": ints(0), "int64": ints(1).long()}.get(wrong, ints(1))
        options: dict[str, Any] = {"causal": True} if wrong == "unknown" else {}
        more = ("NONE",) if wrong == "positional" else ()
        with pytest.raises((TypeError, AssertionError)):
            wrapper.plan(ints(0, 2), ints(4, 1), last, *SIZES, *more, q_data_type=HALF, **options)

    def test_another_dtype_than_planned_is_refused(self) -> None:
        """The default of q_data_type is float16, whatever the queries are."""
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NHD")
        wrapper.plan(ints(0, 2), ints(4, 1), ints(1), *SIZES)
        with pytest.raises(AssertionError):
            wrapper.run(query().bfloat16(), pages_of_two())


class TestFlashAttention:
    """Two sequences, of which the second is a chunk of two queries over page 4 and the first slot of page 1."""

    def test_version_3(self) -> None:
        output = flash_attn_doubles.flash_attn_3(
            query(3),
            *pages_of_two(),
            cache_seqlens=ints(2, 3),
            page_table=torch.stack([ints(4, 0), ints(4, 1)]),
            cu_seqlens_q=ints(0, 1, 3),
            max_seqlen_q=2,
            causal=True,
        )
        assert first(output) == near(7, 7, 5.8)

    def test_version_3_with_a_window(self) -> None:
        output = flash_attn_doubles.flash_attn_3(
            query(),
            *pages_of_two(),
            cache_seqlens=ints(3),
            page_table=ints(4, 1)[None],
            cu_seqlens_q=ints(0, 1),
            max_seqlen_q=1,
            causal=True,
            window_size=(1, 0),
        )
        assert first(output) == near(2.5)

    @pytest.mark.parametrize("version", ["2", "torch"])
    def test_pages_of_256(self, version: str) -> None:
        keys, values = torch.full((2, 3, 256, 1, DIM), float("nan"), dtype=HALF)
        for slot, (key, value) in enumerate(((1, 8), (0, 4), (0, 1))):
            keys[2, slot, 0], values[2, slot, 0] = key * UNIT, value * UNIT
        tables = torch.stack([ints(2, 0), ints(2, 1)])
        offsets = (ints(0, 1, 3), ints(0, 2, 5), 2, 3)
        if version == "2":
            output = flash_attn_doubles.flash_attn_2(query(3), keys, values, *offsets, causal=True, block_table=tables)
        else:
            options = {"window_size": (-1, 0), "num_splits": 1, "enable_gqa": True}
            output = flash_attn_doubles.varlen_attn(
                query(3), keys, values, *offsets, seqused_k=ints(2, 3), block_table=tables, **options
            )
        assert first(output) == near(7, 7, 5.8)

    def test_version_2_reads_no_small_pages(self) -> None:
        with pytest.raises(AssertionError):
            flash_attn_doubles.flash_attn_2(
                query(), *pages_of_two(), ints(0, 1), ints(0, 2), 1, 2, causal=True, block_table=ints(4, 1)[None]
            )


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_the_installed_flashinfer_is_called_as_the_recorded_one() -> None:
    assert flashinfer_signatures() == RECORDED["flashinfer"]
