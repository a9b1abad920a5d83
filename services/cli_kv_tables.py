"""How a pool and a block table look on a terminal."""

from __future__ import annotations

from humanize import naturalsize
from octavo.kv.v1 import kv_manager_pb2 as pb
from rich.table import Table
from rich.text import Text

from services.cli_kv_common import choice_name

HASH_DIGITS = 16
"""Enough to tell blocks apart; --json has all 64."""


def pool_facts(answer: pb.GetPoolResponse) -> Text:
    """One line: which pool this is, and how its books are kept."""
    spec = answer.spec
    size = f", {naturalsize(spec.bytes_per_block, binary=True)} each" if spec.bytes_per_block else ""
    model = f" for {spec.model_fingerprint}" if spec.model_fingerprint else ""
    blocks = f"{spec.num_blocks} blocks of {spec.block_size} tokens{size}"
    return Text(f"Pool {answer.pool_id} (epoch {answer.epoch}){model}: {blocks}; {_kept(spec)}")


def pool_table(answer: pb.GetPoolResponse) -> Table:
    """Blocks by state with their share of the usable ones, then tokens and totals."""
    table = Table("", "count", "share", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    occupancy, totals = answer.occupancy, answer.totals
    usable = occupancy.usable_blocks
    _add(table, "usable blocks", usable)
    _add(table, "  free", occupancy.free_blocks, usable)
    _add(table, "  cached", occupancy.cached_blocks, usable)
    _add(table, "    pinned", occupancy.pinned_blocks, usable)
    _add(table, "  held", occupancy.held_blocks, usable)
    _add(table, "    shared", occupancy.shared_blocks, usable)
    _add(table, "    leased", occupancy.leased_blocks, usable)
    _add(table, "reserved tokens", occupancy.reserved_tokens)
    _add(table, "  stored", occupancy.stored_tokens, occupancy.reserved_tokens)
    _add(table, "sequences", occupancy.sequences)
    table.add_section()
    _add(table, "blocks allocated, in total", totals.allocated_blocks)
    _add(table, "blocks reused from the cache", totals.reused_blocks)
    _add(table, "blocks freed", totals.freed_blocks)
    _add(table, "blocks evicted", totals.evicted_blocks)
    _add(table, "blocks removed with their prefix", totals.removed_blocks)
    _add(table, "forks", totals.forks)
    _add(table, "blocks copied", totals.copies)
    _add(table, "prompt tokens looked up", totals.queried_tokens)
    _add(table, "  found cached", totals.hit_tokens, totals.queried_tokens)
    recent = answer.recent_lookups
    _add(table, f"looked up by the last {recent.lookups} prompts", recent.queried_tokens)
    _add(table, "  found cached", recent.hit_tokens, recent.queried_tokens)
    _add(table, "refused for want of blocks", totals.allocation_failures)
    _add(table, "  because of a quota", totals.quota_failures)
    _add(table, "  because of pins", totals.pin_failures)
    _add(table, "frees of unknown sequences", totals.unknown_frees)
    return table


def block_table(answer: pb.GetBlockTableResponse) -> Table:
    """One row for each block of the sequence."""
    sequence = answer.sequence
    title = (
        f"Sequence {sequence.sequence_id}: {sequence.num_tokens} tokens, {sequence.computed_tokens} computed, "
        f"{sequence.cached_tokens} were cached"
    )
    table = Table("index", "block", "count", "tokens", "hash", box=None, pad_edge=False, title_justify="left")
    table.title = Text(title, style="not italic")
    for column in table.columns[:4]:
        column.justify = "right"
    for index, block in enumerate(answer.blocks):
        table.add_row(
            str(index),
            str(block.block_id),
            str(block.reference_count),
            str(block.stored_tokens),
            block.block_hash.hex()[:HASH_DIGITS] or "-",
        )
    return table


def _kept(spec: pb.PoolSpec) -> str:
    """The choices of a pool: 'index radix, names sha256, eviction lru'."""
    index = choice_name(pb.PrefixIndex.DESCRIPTOR, spec.prefix_index)
    names = choice_name(pb.HashAlgorithm.DESCRIPTOR, spec.hash_algorithm)
    eviction = choice_name(pb.EvictionPolicy.DESCRIPTOR, spec.eviction_policy)
    return f"index {index}, names {names}, eviction {eviction}"


def _add(table: Table, name: str, count: int, whole: int | None = None) -> None:
    share = f"{count / whole:.1%}" if whole else ""
    table.add_row(name, str(count), share)
