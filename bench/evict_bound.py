"""What a cache could hit that knows how long blocks of each class are worth keeping: by counting, without a policy.

    python -m bench.evict_bound --trace tests/data/mooncake_conversation_trace.jsonl

A block's class is what its past tells of it, as the default policy reads it: uses or turn, the new blocks of its last
prompt, how long it had waited, whether it ended the prompt. A block is kept for its class's time and then given up.
The times are those that earn the most hits at a price for each block and time, and the price is such that as many
blocks are held as there is room for, on average. So there is nothing to learn, and a long prompt takes no room from
others: a policy that has these classes and must keep to its room all the time has less.

Times that are counted on the conversations that they are used on know what is to come. So they are counted on seven
eighths of the conversations and used on the last one, in turn: "foreseen". "Fitted" is what counting on all would give.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.evict import prompts

FOLDS = 8
CAPACITIES = (1_000, 3_000, 10_000)
PRICES = np.geomspace(1.0, 1e-6, 400)
PARTS = ("uses", "tail", "new", "wait")
SETS = (("uses",), ("uses", "tail"), ("uses", "tail", "wait"), ("uses", "tail", "new"), PARTS)
_EDGES = {
    "uses": (2, 3, 4, 6, 9),
    "tail": (1,),
    "new": (2, 8, 32, 100),
    "wait": (1, 1_000, 2_000, 4_000, 8_000, 16_000),
}

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Lives:
    """From each use of a block to the next, or to the end: int64 arrays of the same length.

    parts: what a class is made of, by its name. waits: in stored blocks. returned: whether a use came. folds: which
    eighth of the conversations. total: the length of the trace, in stored blocks.
    """

    parts: dict[str, Ints]
    waits: Ints
    returned: Ints
    folds: Ints
    total: int


@dataclass(slots=True)
class _Block:
    uses: int = 0
    turn: int = 0
    last: int = 0
    life: int = -1


def lives(requests: Iterable[Sequence[int]]) -> Lives:
    """All lives of a trace."""
    blocks: dict[int, _Block] = {}
    rows: list[tuple[int, ...]] = []
    ends: list[int] = []
    now = 0
    for ids in requests:
        known = next((depth for depth, each in enumerate(ids) if each not in blocks), len(ids))
        start, now = now, now + len(ids) - known
        turn, wait = 1, 0
        if known and blocks[ids[known - 1]].uses == 1:
            turn, wait = blocks[ids[known - 1]].turn + 1, start - blocks[ids[known - 1]].last
        fold = zlib.crc32(str(ids[min(1, len(ids) - 1)]).encode()) % FOLDS
        for depth, each in enumerate(ids):
            block = blocks.setdefault(each, _Block())
            if block.life >= 0:
                ends[block.life] = start
            block.uses += 1
            waited = wait if turn >= block.uses else start - block.last
            block.turn, block.last, block.life = turn, now, len(rows)
            rows.append((max(turn, block.uses), depth == len(ids) - 1, len(ids) - known, waited, now, fold))
            ends.append(-1)
    table, end = np.array(rows, np.int64), np.array(ends, np.int64)
    columns = dict(zip(PARTS, table.T[:4], strict=True))
    parts = {part: np.digitize(column, _EDGES[part]).astype(np.int64) for part, column in columns.items()}
    returned = (end >= 0).astype(np.int64)
    return Lives(parts, np.where(returned, end, now) - table[:, 4], returned, table[:, 5], now)


@dataclass(frozen=True, slots=True)
class Bound:
    """Hits at one capacity by times that were counted on other conversations, and on the same."""

    foreseen: int
    fitted: int


def bounds(known: Lives, parts: Sequence[str], capacities: Sequence[int]) -> list[Bound]:
    """What classes made of `parts` could hit."""
    hits, room = _by_time(known, parts)
    everywhere = hits.sum(0), room.sum(0)
    foreseen, fitted = [], []
    for price in PRICES:
        best = (everywhere[0] - price * everywhere[1]).argmax(1)
        fitted.append(_at(everywhere, best))
        held = [0.0, 0.0]
        for own in zip(hits, room, strict=True):
            others = (everywhere[0] - own[0]) - price * (everywhere[1] - own[1])
            held = [one + more for one, more in zip(held, _at(own, others.argmax(1)), strict=True)]
        foreseen.append((held[0], held[1]))
    return [
        Bound(*(_hits_in(points, capacity * known.total) for points in (foreseen, fitted))) for capacity in capacities
    ]


def _by_time(known: Lives, parts: Sequence[str]) -> tuple[Floats, Floats]:
    """Hits, and room times time, by fold, class and how long blocks are kept, in half octaves."""
    times = np.concatenate([[0.0], 2.0 ** np.arange(0.0, np.log2(max(2, known.waits.max())) + 0.5, 0.5)])
    number = np.zeros(len(known.waits), np.int64)
    for part in parts:
        number = number * (len(_EDGES[part]) + 1) + known.parts[part]
    _, number = np.unique(number, return_inverse=True)
    shape = (FOLDS, int(number.max()) + 1, len(times))
    hits, room = np.zeros(shape), np.zeros(shape)
    back = known.returned == 1
    np.add.at(hits, (known.folds[back], number[back], np.searchsorted(times, known.waits[back])), 1.0)
    for place, time in enumerate(times):
        np.add.at(room[:, :, place], (known.folds, number), np.minimum(known.waits, time))
    return hits.cumsum(2), room


def _at(table: tuple[Floats, Floats], times: Ints) -> tuple[float, float]:
    """Hits and room of all classes, each kept for its time."""
    hits, room = (np.take_along_axis(each, times[:, None], 1).sum() for each in table)
    return float(hits), float(room)


def _hits_in(points: Sequence[tuple[float, float]], room: float) -> int:
    """Hits in `room`: in between two prices, some blocks are kept by one and some by the other."""
    ordered = sorted((taken, hits) for hits, taken in points)
    return int(np.interp(room, [taken for taken, _ in ordered], [hits for _, hits in ordered]))


def main(
    trace: Annotated[Path, typer.Option(help="JSON lines with hash_ids, as Mooncake publishes them.")],
    capacity: Annotated[list[int] | None, typer.Option(help="Capacity in blocks; may be given often.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Prints what each set of classes could hit: foreseen, and fitted to the trace."""
    capacities = capacity or list(CAPACITIES)
    known = lives(prompts(trace))
    found = {" ".join(parts): bounds(known, parts, capacities) for parts in SETS}
    if as_json:
        rows = {name: [[each.foreseen, each.fitted] for each in row] for name, row in found.items()}
        typer.echo(json.dumps({"capacities": capacities, "hits": rows}))
        return
    typer.echo(f"{'classes by':<20}" + "".join(f"{each:>20,}" for each in capacities))
    for name, row in found.items():
        typer.echo(f"{name:<20}" + "".join(f"{f'{each.foreseen:,} ({each.fitted:,})':>20}" for each in row))


if __name__ == "__main__":
    typer.run(main)
