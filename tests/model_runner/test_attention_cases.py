"""The table of cases on every attention backend; GPU kernels run in Triton's interpreter."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_runner import native
from model_runner.attention import BACKENDS, AttentionBackend, AttentionShape
from model_runner.attention.flash_attn import VERSIONS, FlashAttention
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.triton import Tiling, TritonAttention
from model_runner.books import CopyOrder
from model_runner.kv_scales import KvScales
from tests.model_runner import flash_attn_doubles, gpu_doubles
from tests.model_runner.attention_cases import CASES, PROPERTIES, TYPES, Case, pairs_of
from tests.model_runner.attention_world import BF16_TOLERANCE, CPU, Maker, World, assert_near, mixed


def make_triton(shape: AttentionShape) -> AttentionBackend:
    """Small tiles, so that short sequences are cut into several tiles and parts."""
    return TritonAttention(shape, Tiling(rows=64, keys=32, part=64))


def make_flashinfer(shape: AttentionShape) -> AttentionBackend:
    return FlashInferAttention(shape, gpu_doubles.flashinfer, workspace_bytes=16)


def make_flash_attn(shape: AttentionShape) -> AttentionBackend:
    """Version 3, the only one that reads blocks of such sizes."""
    return FlashAttention(shape, VERSIONS[0], flash_attn_doubles.flash_attn_3)


MAKERS: dict[str, Maker] = {
    **{name: BACKENDS[name] for name in ("reference", "cpu_torch", "cpu")},
    "triton": make_triton,
    "flashinfer": make_flashinfer,
    "flash_attn": make_flash_attn,
}
LARGE_ONLY: dict[str, Maker] = {
    "flash_attn 2": lambda shape: FlashAttention(shape, VERSIONS[1], flash_attn_doubles.flash_attn_2),
    "varlen_attn": lambda shape: FlashAttention(shape, VERSIONS[2], flash_attn_doubles.varlen_attn),
}
"""What reads blocks of 256 tokens alone."""
DOUBLES = ("flashinfer", "flash_attn", *LARGE_ONLY)
"""Backends whose kernels are played by doubles; what the kernels themselves read, only a GPU can tell."""
OURS = [name for name in MAKERS if name not in DOUBLES]
SCALES = KvScales((0.3, 1.0, 0.011), (0.07, 2.5, 1.0))


@pytest.fixture(autouse=True, scope="module")
def one_thread(torch_threads: None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cases_of(name: str) -> list[Case]:
    return [case for case in CASES if BACKENDS[name].why_not_shape(case.shape) is None]


def skip_unless_here(name: str) -> None:
    reason = None if name in DOUBLES else BACKENDS[name].why_not_here(CPU)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("name", "case"), [pytest.param(name, case, id=f"{name}-{case}") for name in MAKERS for case in cases_of(name)]
)
def test_rows_are_those_of_dense_attention(name: str, case: Case) -> None:
    skip_unless_here(name)
    case.check(MAKERS[name])


@pytest.mark.parametrize("size", [128, 256])
@pytest.mark.parametrize("name", [*MAKERS, *LARGE_ONLY])
def test_large_blocks(name: str, size: int) -> None:
    """Those of the table would be long to compute: here a prompt goes on in its second block, and then by a token."""
    skip_unless_here(name)
    if name in LARGE_ONLY and size % 256:
        pytest.skip("it reads blocks of multiples of 256 tokens")
    known = "float32" if name in OURS else "float16"
    shape = replace(Case("mha", known, 64, "mixed", size, 16, None).shape, num_heads=2, num_kv_heads=1)
    world = World((MAKERS | LARGE_ONLY)[name], shape, [size + 3, 5])
    rows = world.rows([[(0, size - 1)], [(0, 3), (1, 5)], [(0, 1)]])
    for sequence, found in zip(world.sequences, rows, strict=True):
        assert_near(found, sequence.expected(world.shape), TYPES[known].tolerance)


def test_each_pair_of_values_is_in_a_case() -> None:
    found = set().union(*map(pairs_of, CASES))
    for (one, firsts), (other, seconds) in itertools.combinations(PROPERTIES.items(), 2):
        for first, second in itertools.product(firsts, seconds):
            assert ((one, first), (other, second)) in found


def test_who_refuses_what() -> None:
    """A backend that refused too much would pass all that is left."""
    refused = {name: [case for case in CASES if case not in cases_of(name)] for name in MAKERS}
    assert refused["reference"] == refused["cpu_torch"] == refused["triton"] == []
    for case in CASES:
        is_small = case.types in ("float16", "bfloat16")
        is_known = (is_small or case.types.endswith("16 over fp8")) and case.head_dim in (64, 128, 256)
        assert (case in refused["flashinfer"]) == (not is_known or "float32" in case.types)
        assert (case in refused["flash_attn"]) == (not is_small)
        is_known = case.types in ("float32", "float32 over bfloat16", "bfloat16") and case.cap is None
        assert (case in refused["cpu"]) == (not is_known)


@pytest.mark.parametrize("name", MAKERS)
def test_where_blocks_lie_does_not_change_a_bit(name: str) -> None:
    skip_unless_here(name)
    shape = Case("gqa3", "float16" if name in DOUBLES else "float32", 64, "mixed", 8, None, None).shape
    lengths, steps = mixed(8)
    world = World(MAKERS[name], shape, lengths)
    expected = world.rows(steps)
    for sequence in world.sequences:
        sequence.table = [world.shape.num_blocks - block for block in sequence.table]
    world.restart(MAKERS[name])
    for rows, before in zip(world.rows(steps), expected, strict=True):
        assert torch.equal(rows, before)


@pytest.mark.parametrize("name", OURS)
def test_what_no_query_sees_any_more_is_not_read(name: str) -> None:
    """Blocks behind the window may be another's by now: here they are NaN."""
    skip_unless_here(name)
    shape = Case("gqa2", "float32", 64, "mixed", 8, 12, None).shape
    world = World(MAKERS[name], shape, [33])
    (sequence,) = world.sequences
    world.step([(0, 29)])
    # The query at position 29 sees keys 18 to 29: blocks 0 and 1 of 8 tokens are behind, 2 is seen in part.
    world.backend.poison(sequence.table[:2])
    (chunk,) = world.step([(0, 3)])
    (token,) = world.step([(0, 1)])
    assert_near(torch.cat([chunk, token], dim=1), sequence.expected(shape)[:, 29:])


@pytest.mark.parametrize("name", ["reference", "cpu_torch", "triton", "flashinfer"])
def test_numbers_beyond_8_bits_become_the_largest(name: str) -> None:
    """448 is the largest of fp8_e4m3, with a scale of 2 it is 896. A token that is alone gives its own values.

    The second layer's scale is 0.07.
    """
    skip_unless_here(name)
    world = World(MAKERS[name], Case("gqa2", "float16 over fp8", 64, "single", 16, None, None).shape, [1, 1])
    for sequence, value in zip(world.sequences, (1000.0, -1000.0), strict=True):
        sequence.values.fill_(value)
    for output, sign in zip(world.step([(0, 1), (1, 1)]), (1, -1), strict=True):
        assert (output[0] == sign * 896.0).all()
        assert_near(output[1], torch.full_like(output[1], sign * 448 * 0.07), 0.02)


@pytest.mark.parametrize("name", ["reference", "cpu_torch"])
def test_a_scale_that_is_no_power_of_two(name: str) -> None:
    """What is cached is a number of 8 bits times the scale, so it comes back but for float32's rounding."""
    shape = replace(Case("gqa3", "float32", 64, "mixed", 16, 12, None).shape, num_layers=3, scales=SCALES)
    lengths, steps = mixed(16)
    world = World(MAKERS[name], replace(shape, kv_dtype=torch.float8_e4m3fn), lengths)
    for sequence, rows in zip(world.sequences, world.rows(steps), strict=True):
        assert_near(rows, sequence.expected(world.shape))


@pytest.mark.parametrize("name", ["reference", "cpu_torch", "triton", "flashinfer"])
def test_copied_blocks_of_8_bits_keep_their_layers_scales(name: str) -> None:
    """A fork goes on from its copy of 4 slots, in a cache that is NaN where nobody wrote."""
    skip_unless_here(name)
    case = Case("gqa2", "float16 over fp8", 64, "mixed", 16, None, None)
    world = World(MAKERS[name], case.shape, [24, 24])
    parent, child = world.sequences
    for mine, theirs in ((child.keys, parent.keys), (child.values, parent.values)):
        mine[:, :20] = theirs[:, :20]
    world.step([(0, 20)])
    child.computed, child.table[0] = 20, parent.table[0]
    world.backend.copy_blocks([CopyOrder(parent.table[1], child.table[1], 4)])
    for sequence, rows in zip(world.sequences, world.step([(0, 4), (1, 4)]), strict=True):
        assert_near(rows, sequence.expected(world.shape)[:, 20:], TYPES[case.types].tolerance)


def _untouched(size: int | Sequence[int], *, dtype: torch.dtype, device: object = None) -> Tensor:
    """Zeros that take memory only where they are written."""
    size = (size,) if isinstance(size, int) else size
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(*size)


@pytest.mark.parametrize("name", MAKERS)
def test_offsets_beyond_31_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences, and a copy, in the last blocks of a cache of more than 2**31 numbers.

    Of a double's backend this shows its own part: block ids, slots, views and copies.
    """
    skip_unless_here(name)
    types = "float32 over bfloat16" if name in OURS else "float16"
    shape = replace(Case("gqa2", types, 256, "mixed", 16, None, None).shape, num_kv_heads=1)
    world = World(MAKERS[name], shape, [40, 20, 21])
    num_blocks = 2**31 // (16 * 256) + world.shape.num_blocks
    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", _untouched)
        patched.setattr(native, "zeros", lambda size, dtype: _untouched(size, dtype=dtype))
        world.backend = MAKERS[name](replace(shape, num_blocks=num_blocks))
    if name == "triton":
        # The interpreter would copy the cache to itself, and so touch all of it.
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    for sequence in world.sequences:
        sequence.table = [num_blocks - 1 - block for block in sequence.table]
        world.backend.poison(sequence.table)
    assert min(min(sequence.table) for sequence in world.sequences) * 16 * 256 >= 2**31
    first, parent, child = world.sequences
    for theirs, mine in ((parent.keys, child.keys), (parent.values, child.values)):
        mine[:, :20] = theirs[:, :20]
    outputs = world.step([(0, 30), (1, 20)])
    child.computed, child.table[0] = 20, parent.table[0]
    world.backend.copy_blocks([CopyOrder(parent.table[1], child.table[1], 4)])
    outputs += world.step([(0, 10), (2, 1)])
    expected = [first.expected(shape)[:, :30], parent.expected(shape), first.expected(shape)[:, 30:]]
    for rows, wanted in zip(outputs, [*expected, child.expected(shape)[:, 20:]], strict=True):
        assert_near(rows, wanted, BF16_TOLERANCE)
