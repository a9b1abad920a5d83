"""Prefix-cache hits of an eviction policy on a recorded trace, by driving the real books.

    python -m bench.evict --trace tests/data/mooncake_conversation_trace.jsonl --capacity 10000 --json

Each hash id of the trace stands for one full 16-token block with everything before it. A prompt is its blocks and one
last token; requests are allocated, computed and freed in the file's order. A pool of capacity + 1 usable blocks has
room for `capacity` cached blocks beside the last token's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvmanager import Pool
from kvmanager.types import Append, PoolSpec

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Replay:
    """Blocks that were found cached, of the full blocks that were asked for."""

    hits: int
    blocks: int


def prompts(trace: Path) -> Iterator[list[int]]:
    """The block ids of each request, in the file's order."""
    with trace.open() as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


def replay(trace: Path, capacity: int) -> Replay:
    """Replays the trace in a pool with room for `capacity` cached blocks. Raises NeverFits when a prompt is larger."""
    pool = Pool(PoolSpec(capacity + 2, BLOCK_SIZE))
    hits = blocks = 0
    for block_ids in prompts(trace):
        token_ids = [block_id for block_id in block_ids for _ in range(BLOCK_SIZE)]
        token_ids.append(0)
        hits += pool.allocate("prompt", token_ids).cached_tokens // BLOCK_SIZE
        blocks += len(block_ids)
        pool.free([Append("prompt", (), len(token_ids))])
    return Replay(hits, blocks)


def main(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, as Mooncake publishes them.")],
    capacity: Annotated[int, typer.Option(min=1, help="Blocks that may stay cached.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Counts the hits of LRU, the policy that the books have."""
    result = replay(trace, capacity)
    if as_json:
        typer.echo(json.dumps(asdict(result)))
    else:
        share = result.hits / result.blocks if result.blocks else 0.0
        typer.echo(f"{result.hits} of {result.blocks} blocks hit ({share:.1%}) with {capacity} cached blocks")


if __name__ == "__main__":
    typer.run(main)
