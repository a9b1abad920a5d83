"""Paged attention in Triton: attending through block tables, merging parts of long sequences, writing, copying blocks.

Caches are [blocks, block_size, kv heads, head_dim] of one layer, or the same with all layers in front. Whatever is
multiplied by a block's or a slot's number is int64: a cache may have more than 2**31 elements. Import this module only
where Triton runs: on a GPU, or with TRITON_INTERPRET=1 on a CPU. What differs from step to step is not specialised:
Triton would compile anew for a 1 and for multiples of 16.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def, untyped-decorator"
# A kernel's parameters are pointers and numbers of the device; its docstring says of what.

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
IS_INTERPRETED = triton.knobs.runtime.interpret


def compute_type(dtype: torch.dtype) -> tl.dtype:
    """In what queries of a dtype are multiplied: as they are, but the interpreter has no products in bfloat16."""
    if dtype is torch.float32 or (dtype is torch.bfloat16 and IS_INTERPRETED):
        return tl.float32
    return tl.bfloat16 if dtype is torch.bfloat16 else tl.float16


@triton.jit(do_not_specialize=["table_stride"])
def attend(
    queries,
    keys,
    values,
    output,
    part_sums,
    block_tables,
    sequence_lengths,
    query_offsets,
    tile_sequences,
    tile_firsts,
    query_stride,
    table_stride,
    block_stride,
    slot_stride,
    head_stride,
    num_heads,
    scale,
    cap,
    v_scale,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PART: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: the queries of a tile and of one KV head, against one part of the keys that they see.

    Grid: (tiles, KV heads, parts). A tile is ROWS / GROUP_ROWS tokens of one sequence, from token tile_firsts[tile] of
    the step's own on; each has GROUP_ROWS rows, of which GROUP are query heads. DIM and GROUP_ROWS are HEAD_DIM and
    GROUP rounded up to powers of two. keys are read KEYS at a time.

    Products are of COMPUTE, a type, and summed in float32. WINDOW = 0: none.

    PART = 0: one part has all keys, and output [T, num_heads, HEAD_DIM] gets what is attended. Else a part has PART
    keys, tiles are single tokens, output is float32 [tiles, parts, num_heads, HEAD_DIM], and part_sums, float32
    [tiles, parts, num_heads], gets the base-2 logarithms of the sums of weights.
    """
    tile, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tile_sequences + tile)
    first = tl.load(tile_firsts + tile)
    length = tl.load(sequence_lengths + sequence)
    offset = tl.load(query_offsets + sequence)
    count = tl.load(query_offsets + sequence + 1) - offset

    row = tl.arange(0, ROWS)
    token = first + row // GROUP_ROWS
    in_group = row % GROUP_ROWS
    is_row = (token < count) & (in_group < GROUP)
    position = length - count + token
    head = kv_head * GROUP + in_group
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    at = (offset + token).to(tl.int64)[:, None] * query_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
    query = tl.load(queries + at, mask=is_row[:, None] & is_dim[None, :], other=0.0).to(COMPUTE)

    # The keys that any row of the tile sees: those before may be another sequence's by now, those after no one's yet.
    end = tl.minimum(length, length - count + first + ROWS // GROUP_ROWS)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(0, length - count + first + 1 - WINDOW)
    start = begin // KEYS * KEYS
    stop = end
    if PART > 0:
        start += part * PART
        stop = tl.minimum(end, start + PART)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, DIM], tl.float32)
    for first_key in range(start, stop, KEYS):
        key_position = first_key + tl.arange(0, KEYS)
        is_key = (key_position >= begin) & (key_position < end)
        block = tl.load(block_tables + sequence.to(tl.int64) * table_stride + key_position // BLOCK_SIZE, is_key, 0)
        slot = block.to(tl.int64) * block_stride + (key_position % BLOCK_SIZE).to(tl.int64) * slot_stride
        here = slot[:, None] + kv_head * head_stride + dim[None, :]
        is_number = is_key[:, None] & is_dim[None, :]
        key = tl.load(keys + here, mask=is_number, other=0.0).to(COMPUTE)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if HAS_CAP:
            # cap x tanh(scores / cap), by a form whose limits are exact.
            scores = cap * (1 - 2 / (1 + tl.exp2(scores * (2 * LOG2_E / cap))))
        seen = is_key[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (key_position[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores * LOG2_E, float("-inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen nothing yet has -inf, from which nothing may be taken away.
        base = tl.where(now_largest == float("-inf"), 0.0, now_largest)
        weights = tl.exp2(scores - base[:, None])
        keep = tl.exp2(largest - base)
        total = total * keep + tl.sum(weights, 1)
        value = tl.load(values + here, mask=is_number, other=0.0).to(COMPUTE)
        attended = attended * keep[:, None]
        attended = tl.dot(weights.to(COMPUTE), value, attended, input_precision=PRECISION)
        largest = now_largest

    is_empty = total == 0
    attended = attended / tl.where(is_empty, 1.0, total)[:, None] * v_scale
    if PART == 0:
        to = ((offset + token).to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(output + to, attended.to(output.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])
    else:
        part_row = (tile * tl.num_programs(2) + part).to(tl.int64) * num_heads + head
        to = part_row[:, None] * HEAD_DIM + dim[None, :]
        tl.store(output + to, attended, mask=is_row[:, None] & is_dim[None, :])
        sums = tl.where(is_empty, float("-inf"), largest + tl.log2(tl.where(is_empty, 1.0, total)))
        tl.store(part_sums + part_row, sums, mask=is_row)


@triton.jit(do_not_specialize=["num_parts"])
def merge(
    parts,
    part_sums,
    output,
    tile_sequences,
    query_offsets,
    num_parts,
    num_heads,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):
    """Parts that attend() left of single tokens become one: output [T, num_heads, HEAD_DIM]. Grid: (tiles, num_heads).

    parts: float32 [tiles, num_parts, num_heads, HEAD_DIM]; part_sums: float32 [tiles, num_parts, num_heads], base 2.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(query_offsets + tl.load(tile_sequences + tile))
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    first = tile.to(tl.int64) * num_parts * num_heads + head
    # The first part is never empty: each token sees a key of it, or at least itself.
    largest = tl.load(part_sums + first)
    total = tl.full((), 1.0, tl.float32)
    attended = tl.load(parts + first * HEAD_DIM + dim, mask=is_dim, other=0.0)
    for part in range(1, num_parts):
        here = first + part * num_heads
        log_sum = tl.load(part_sums + here)
        now_largest = tl.maximum(largest, log_sum)
        keep, weight = tl.exp2(largest - now_largest), tl.exp2(log_sum - now_largest)
        total = total * keep + weight
        attended = attended * keep + weight * tl.load(parts + here * HEAD_DIM + dim, mask=is_dim, other=0.0)
        largest = now_largest
    to = (row.to(tl.int64) * num_heads + head) * HEAD_DIM + dim
    tl.store(output + to, (attended / total).to(output.dtype.element_ty), mask=is_dim)


@triton.jit
def write(
    new_keys,
    new_values,
    keys,
    values,
    slot_mapping,
    key_stride,
    value_stride,
    k_scale,
    v_scale,
    IS_SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    NUMBERS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Puts a token's K and V, NUMBERS each, to its slot. Grid: (T,).

    new_keys, new_values: [T, NUMBERS], rows a stride apart; keys, values: [slots, NUMBERS] of one layer. LIMIT: the
    largest number of a cache of 8 bits, 0 for others. LANES: NUMBERS rounded up to a power of two.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    is_number = lane < NUMBERS
    slot = tl.load(slot_mapping + token).to(tl.int64) * NUMBERS + lane
    key = tl.load(new_keys + token * key_stride + lane, mask=is_number)
    value = tl.load(new_values + token * value_stride + lane, mask=is_number)
    if IS_SCALED:
        key, value = key.to(tl.float32) / k_scale, value.to(tl.float32) / v_scale
    if LIMIT > 0:
        key = tl.clamp(key.to(tl.float32), -LIMIT, LIMIT)
        value = tl.clamp(value.to(tl.float32), -LIMIT, LIMIT)
    tl.store(keys + slot, key.to(keys.dtype.element_ty), mask=is_number)
    tl.store(values + slot, value.to(values.dtype.element_ty), mask=is_number)


@triton.jit(do_not_specialize=["num_copies"])
def copy_blocks(
    keys, values, copies, num_copies, layer_stride, block_stride, SLOT_NUMBERS: tl.constexpr, LANES: tl.constexpr
):
    """Copies the first slots of blocks in all layers, one order after the other. Grid: (layers, parts of a block).

    copies: int32 [num_copies, 3] of source, target and slots. A program has the same LANES numbers of every block, so
    what a later order reads of an earlier one, the program itself has written.
    """
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    layer = tl.program_id(0).to(tl.int64) * layer_stride
    for order in range(num_copies):
        source = layer + tl.load(copies + 3 * order).to(tl.int64) * block_stride + lane
        target = layer + tl.load(copies + 3 * order + 1).to(tl.int64) * block_stride + lane
        is_number = lane < tl.load(copies + 3 * order + 2) * SLOT_NUMBERS
        tl.store(keys + target, tl.load(keys + source, mask=is_number), mask=is_number)
        tl.store(values + target, tl.load(values + source, mask=is_number), mask=is_number)
        tl.debug_barrier()
