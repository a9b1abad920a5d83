"""How much K/V fits: bytes per token and per block, and how many blocks a memory budget buys."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from humanize import naturalsize

describe_bytes = partial(naturalsize, binary=True, format="%.4g")
"""A number of bytes in the largest unit that keeps it above 1: 50_331_648 is '48 MiB'."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The shape of one token's K/V. element_bytes is the size of the cache's dtype; block_size is in tokens."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    block_size: int

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.element_bytes

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size

    def blocks_for_tokens(self, num_tokens: int) -> int:
        """Blocks that a pool needs to hold `num_tokens` of one sequence, the null block included."""
        return -(-num_tokens // self.block_size) + 1

    def blocks_for_budget(self, budget_bytes: int) -> int:
        """Blocks that fit the budget, the null block included. Raises ValueError when none of them could be used."""
        num_blocks = budget_bytes // self.bytes_per_block
        if num_blocks < 2:
            # In whole KiB, rounded up: a shorter figure would be rounded to one that is refused again.
            least_kib = -(-2 * self.bytes_per_block // 1024)
            raise ValueError(
                f"{describe_bytes(budget_bytes)} of KV cache memory hold {num_blocks} blocks of "
                f"{describe_bytes(self.bytes_per_block)}, and at least 2 are needed (block 0 is the null block): give "
                f"--kv-cache-memory {least_kib}KiB or more."
            )
        return num_blocks

    def describe(self, num_blocks: int, num_heads: int) -> dict[str, str]:
        """The arithmetic for the log: a line each of a token, a block, the cache, and what shared KV heads save."""
        total = num_blocks * self.bytes_per_block
        group = num_heads // self.num_kv_heads
        shared = f"{group} query heads share one" if group > 1 else "one for each query head"
        saved = f": 1/{group} of {describe_bytes(total * group)}" if group > 1 else ""
        return {
            "kv_of_a_token": f"2 (K, V) x {self.num_kv_heads} KV heads x {self.head_dim} x {self.element_bytes} B = "
            f"{self.bytes_per_token // self.num_layers:,} B a layer; x {self.num_layers} layers = "
            f"{self.bytes_per_token:,} B",
            "kv_of_a_block": f"x {self.block_size} tokens = {describe_bytes(self.bytes_per_block)}",
            "kv_cache": f"{num_blocks:,} blocks = {describe_bytes(total)}, of which {num_blocks - 1:,} usable hold "
            f"{(num_blocks - 1) * self.block_size:,} tokens",
            "kv_heads": shared + saved,
        }
