"""Hits against capacity, for every eviction policy of the books and for the best possible, as a picture and as JSON.

    python -m bench.evict_curves --trace tests/data/mooncake_conversation_trace.jsonl --out docs/eviction.png

The policies drive the real books (bench.evict); the best possible is Belady's: whatever is used again last goes first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.cache_sim import belady_hits
from bench.evict import Policy, prompts, replay

CAPACITIES = (300, 500, 1_000, 2_000, 3_000, 5_000, 7_000, 10_000, 15_000, 20_000, 30_000, 50_000, 100_000)
POLICIES = (Policy.LRU, Policy.DEFAULT)

Curves = dict[str, list[int]]
"""Hits at each capacity, by the name of the policy."""


def curves(trace: Path, capacities: Sequence[int]) -> Curves:
    """Replays the trace for each policy and capacity, in blocks."""
    requests = list(prompts(trace))
    found = {policy.value: [replay(trace, capacity, policy).hits for capacity in capacities] for policy in POLICIES}
    return {**found, "Belady": [belady_hits(capacity, requests) for capacity in capacities]}


def draw(found: Curves, capacities: Sequence[int], blocks: int, title: str, out: Path) -> None:
    """Writes the picture: the share of the trace's blocks that hit, over the capacity on a logarithmic axis."""
    # Imported late: the numbers alone need no picture.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for (name, hits), style in zip(found.items(), ("o-", "s-", "--"), strict=True):
        axes.plot(capacities, [100 * each / blocks for each in hits], style, markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("capacity, blocks")
    axes.set_ylabel("blocks that hit, %")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(out)


def main(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, as Mooncake publishes them.")],
    out: Annotated[Path | None, typer.Option(help="PNG file to write.")] = None,
    capacity: Annotated[list[int] | None, typer.Option(help="Capacity in blocks; may be given often.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Counts the hits of every policy at every capacity, and draws them."""
    capacities = capacity or list(CAPACITIES)
    found = curves(trace, capacities)
    blocks = sum(len(block_ids) for block_ids in prompts(trace))
    if out is not None:
        draw(found, capacities, blocks, f"{trace.stem}: {blocks:,} blocks", out)
    if as_json:
        typer.echo(json.dumps({"capacities": capacities, "blocks": blocks, "hits": found}))
        return
    typer.echo(f"{'capacity':>10}" + "".join(f"{name:>12}" for name in found))
    for index, each in enumerate(capacities):
        typer.echo(f"{each:>10,}" + "".join(f"{hits[index]:>12,}" for hits in found.values()))


if __name__ == "__main__":
    typer.run(main)
