"""Prefix-cache hits of an eviction policy on a recorded trace, by driving the real books.

    python -m bench.evict --trace tests/data/mooncake_conversation_trace.jsonl --capacity 10000 --policy lru --json

Each hash id of the trace stands for one full 16-token block with everything before it. A prompt is its blocks and one
last token; requests are allocated, computed and freed in the file's order. A pool of capacity + 1 usable blocks has
room for `capacity` cached blocks beside the last token's.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvmanager import Pool
from kvmanager.errors import NeverFits
from kvmanager.types import Append, EvictionKind, PoolSpec

BLOCK_SIZE = 16


class Policy(StrEnum):
    """The eviction policies of the books; `default` is the one that a pool has when nobody says."""

    DEFAULT = "default"
    ADAPTIVE = "adaptive"
    LRU = "lru"

    @property
    def kind(self) -> EvictionKind:
        return PoolSpec(2, BLOCK_SIZE).eviction if self is Policy.DEFAULT else EvictionKind(self.value)


@dataclass(frozen=True, slots=True)
class Replay:
    """Blocks that were found cached, of the full blocks that were asked for; and prompts too large for the pool."""

    hits: int
    blocks: int
    refused: int = 0


def prompts(trace: Path) -> Iterator[list[int]]:
    """The blocks of each request in the file's order, numbered by their first appearance from 1 on."""
    numbers: dict[int, int] = {}
    with trace.open() as lines:
        for line in filter(str.strip, lines):
            yield [numbers.setdefault(block, len(numbers) + 1) for block in json.loads(line)["hash_ids"]]


def replay(trace: Path, capacity: int, policy: Policy = Policy.DEFAULT) -> Replay:
    """Replays the trace in a pool with room for `capacity` cached blocks."""
    pool = Pool(PoolSpec(capacity + 2, BLOCK_SIZE, eviction=policy.kind))
    hits = blocks = refused = 0
    for block_ids in prompts(trace):
        token_ids = array("I", [block_id for block_id in block_ids for _ in range(BLOCK_SIZE)] + [0])
        blocks += len(block_ids)
        try:
            hits += pool.allocate("prompt", token_ids).cached_tokens // BLOCK_SIZE
        except NeverFits:
            refused += 1
            continue
        pool.free([Append("prompt", (), len(token_ids))])
    return Replay(hits, blocks, refused)


def main(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, as Mooncake publishes them.")],
    capacity: Annotated[int, typer.Option(min=1, help="Blocks that may stay cached.")],
    policy: Annotated[Policy, typer.Option(help="Which cached block is given up first.")] = Policy.DEFAULT,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Counts the blocks of a trace that are found cached."""
    result = replay(trace, capacity, policy)
    if result.refused:
        typer.echo(f"{result.refused} prompts of more than {capacity} blocks never fit and hit nothing", err=True)
    if as_json:
        typer.echo(json.dumps({"hits": result.hits, "blocks": result.blocks}))
    else:
        share = result.hits / result.blocks if result.blocks else 0.0
        typer.echo(f"{result.hits} of {result.blocks} blocks hit ({share:.1%}) with {capacity} cached blocks")


if __name__ == "__main__":
    typer.run(main)
