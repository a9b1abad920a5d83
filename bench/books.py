"""The books against vLLM's own block manager, in one run on one machine.

    make bench-peers VLLM_VENV=DIR
    python -m bench.books --vllm-venv DIR

The first line makes an environment with vLLM 0.32.0 and only what its block manager imports; it takes about two
minutes and 2 GB, so keep it outside of the repository. Without one, Octavo's side is measured alone.

The two sides take turns, round by round, in a process each, both on one core where the system can say so: the cores of
a shared host are not equally fast. A figure is the median of the rounds. "Faster" is the median of the ratios of two
rounds that follow each other: a phase in which the machine is slow is one for both. What is compared:

- take, release: BlockPool.get_new_blocks and free_blocks against the same primitives of kvmanager.blocks.
- allocate, free: a prompt that is neither hashed nor looked up. vLLM's part begins with its Request, because that is
  where it copies the tokens; in KVCacheManager caching is off.
- cold, warm: the whole way from token ids to blocks that later prompts can hit. vLLM hashes in Request and publishes in
  allocate_slots; Octavo hashes up to the first miss in allocate and publishes in append, once the tokens are computed.
  So "until published" is both verbs of Octavo. "Before Octavo publishes" is allocate alone, what a prompt waits for:
  there vLLM has hashed and published already, so that ratio says when the work is done, not how fast.
- decode: every sequence is told one token and commits one, and one in 16 needs a new block.
- evict: the primitive, and a cold prompt, in a full pool where every block is cached.

The column "vLLM" names blocks as Octavo does, by SHA-256 over CBOR. The column "default" is vLLM's own choice, SHA-256
over Python's pickle, which is faster and which no other language can recompute.
"""

from __future__ import annotations

import json
import os
import platform
import tracemalloc
from array import array
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count, repeat
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import kvmanager.pool
from bench.rounds import BLOCK_SIZE, Case, Figures, LocalSide, Side, Sizes, prompt, timed
from bench.vllm_side import Skipped, VllmSide
from kvmanager import Pool
from kvmanager.blocks import BlockPool
from kvmanager.types import Append, IndexKind, PoolSpec

Samples = dict[str, defaultdict[str, list[float]]]
"""The figures of each round, by side and line."""
OURS, PEER = "octavo", "vllm"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the result. Its title is filled in from Sizes; without a goal of its own it has that of the build."""

    key: str
    title: str
    unit: str = "us"
    goal: str = ""


LINES = (
    Line("take", "take {blocks:,} fresh blocks (primitive)"),
    Line("release", "release them (primitive)"),
    Line("allocate", "allocate {blocks:,} fresh blocks, no hashing"),
    Line("free", "free them"),
    Line("cold", "cold prompt of {prompt_tokens:,} tokens, until published"),
    Line("cold allocate", "the same before Octavo publishes", goal="none"),
    Line("warm", "warm prompt of {prompt_tokens:,} tokens"),
    Line("free prompt", "free it"),
    Line("decode", "decode step of {sequences:,} sequences"),
    Line("evict", "evict {blocks:,} from a warm pool of {warm_pool:,} (primitive)"),
    Line("evict small", "evict {blocks:,} from a warm pool of {blocks:,} (primitive)"),
    Line("evict prompt", "cold prompt of {blocks:,} blocks in a warm pool of {warm_pool:,}"),
    Line("evict prompt small", "cold prompt of {blocks:,} blocks in a warm pool of {blocks:,}"),
    Line("fork", "fork of the long prompt to {children:,} children, pool of {pool:,}"),
    Line("fork large", "fork of the long prompt to {children:,} children, pool of {large_pool:,}"),
    Line("check cold", "check() of an empty pool of {warm_pool:,}", "ms", "< 50"),
    Line("check warm", "check() of it, all cached", "ms", "< 50"),
    Line("check held", "check() of it, half held by {sequences:,} sequences", "ms", "< 50"),
    Line("bytes opened", "memory per block, opened pool of {warm_pool:,}", "bytes", "< 200"),
    Line("bytes warm", "memory per block, all cached", "bytes", "< 200"),
    Line("bytes radix", "the same of the radix index", "bytes", "< 200"),
)

TIMES_FASTER = {"plain Python": "1.5 times", "compiled": "4 times"}
"""The goal by build, where vLLM has the same line."""

SCALINGS = {
    "evict": ("evict", "evict small"),
    "evict prompt": ("evict prompt", "evict prompt small"),
    "fork": ("fork large", "fork"),
}
"""Lines whose ratio, large pool to small, should be 1."""


# Octavo's side. Every case only uses the verbs of Pool, except "blocks" and "evict", which use these two primitives.


def take_blocks(books: BlockPool, num_blocks: int) -> list[int]:
    return books.take(num_blocks, books.tenants.base)


def release_blocks(books: BlockPool, blocks: list[int]) -> None:
    books.release(blocks[::-1])


def open_pool(usable_blocks: int, index: IndexKind = IndexKind.HASH) -> Pool:
    return Pool(PoolSpec(usable_blocks + 1, BLOCK_SIZE, index=index))


def publish(pool: Pool, token_ids: list[int], sequence_id: str = "prompt") -> tuple[float, float]:
    """Allocates and computes a prompt; microseconds of allocate() and of the append() that publishes its blocks."""
    allocate_us, _ = timed(pool.allocate, sequence_id, token_ids)
    append_us, _ = timed(pool.append, [Append(sequence_id, (), len(token_ids))])
    return allocate_us, append_us


def free(pool: Pool, *sequence_ids: str) -> None:
    pool.free([Append(sequence_id) for sequence_id in sequence_ids])


def blocks(sizes: Sizes) -> Iterator[Figures]:
    books = open_pool(sizes.pool).block_pool
    while True:
        take_us, taken = timed(take_blocks, books, sizes.blocks)
        release_us, _ = timed(release_blocks, books, taken)
        yield {"take": take_us, "release": release_us}


def verbs(sizes: Sizes) -> Iterator[Figures]:
    """Nothing is looked up or committed, so nothing is hashed. The tokens are numbers already, as in vLLM's request."""
    pool = open_pool(sizes.pool)
    token_ids = array("I", prompt(0, sizes.blocks * BLOCK_SIZE))
    while True:
        allocate_us, _ = timed(pool.allocate, "prompt", token_ids, skip_cache_read=True)
        free_us, _ = timed(free, pool, "prompt")
        yield {"allocate": allocate_us, "free": free_us}


def long_prompt(sizes: Sizes) -> Iterator[Figures]:
    pool = open_pool(sizes.pool)
    token_ids = prompt(0, sizes.prompt_tokens)
    while True:
        allocate_us, append_us = publish(pool, token_ids)
        free(pool, "prompt")
        warm_us, warm = timed(pool.allocate, "prompt", token_ids)
        assert warm.cached_tokens == (sizes.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        free_us, _ = timed(free, pool, "prompt")
        pool.reset_cache()
        yield {
            "cold": allocate_us + append_us,
            "cold allocate": allocate_us,
            "warm": warm_us,
            "free prompt": free_us,
        }


def step(pool: Pool, lengths: dict[str, int]) -> None:
    pool.append([Append(sequence_id, [1], computed) for sequence_id, computed in lengths.items()])


def decode(sizes: Sizes) -> Iterator[Figures]:
    pool = open_pool(sizes.warm_pool)
    lengths = {f"sequence-{seed}": sizes.sequence_tokens + seed % BLOCK_SIZE for seed in range(sizes.sequences)}
    for seed, (sequence_id, num_tokens) in enumerate(lengths.items()):
        pool.allocate(sequence_id, prompt(seed, num_tokens))
    step(pool, lengths)
    while True:
        took = 0.0
        for _ in range(sizes.steps):
            lengths = {sequence_id: num_tokens + 1 for sequence_id, num_tokens in lengths.items()}
            took += timed(step, pool, lengths)[0]
        yield {"decode": took / sizes.steps}


def fill(pool: Pool, sizes: Sizes) -> Pool:
    """Leaves every block cached and held by nobody."""
    for seed in range(pool.spec.usable_blocks // sizes.blocks):
        publish(pool, prompt(seed, sizes.blocks * BLOCK_SIZE))
        free(pool, "prompt")
    assert pool.occupancy().free_blocks < sizes.blocks
    return pool


def evict(sizes: Sizes) -> Iterator[Figures]:
    pools = {"": fill(open_pool(sizes.warm_pool), sizes), " small": fill(open_pool(sizes.blocks), sizes)}
    for seed in count(1 << 20, 2):
        figures: Figures = {}
        for name, pool in pools.items():
            figures[f"evict{name}"], taken = timed(take_blocks, pool.block_pool, sizes.blocks)
            release_blocks(pool.block_pool, taken)
            publish(pool, prompt(seed, sizes.blocks * BLOCK_SIZE))
            free(pool, "prompt")
            figures[f"evict prompt{name}"] = sum(publish(pool, prompt(seed + 1, sizes.blocks * BLOCK_SIZE)))
            free(pool, "prompt")
        yield figures


def fork(sizes: Sizes) -> Iterator[Figures]:
    pools = {"": open_pool(sizes.pool), " large": open_pool(sizes.large_pool)}
    children = [f"child-{index}" for index in range(sizes.children)]
    for pool in pools.values():
        publish(pool, prompt(0, sizes.prompt_tokens), "parent")
    while True:
        figures: Figures = {}
        for name, pool in pools.items():
            figures[f"fork{name}"], _ = timed(pool.fork, "parent", children)
            free(pool, *children)
        yield figures


def check(sizes: Sizes) -> Iterator[Figures]:
    pools = {"cold": open_pool(sizes.warm_pool), "warm": fill(open_pool(sizes.warm_pool), sizes)}
    pools["held"] = held = open_pool(sizes.warm_pool)
    for seed in range(sizes.sequences):
        publish(held, prompt(seed, sizes.warm_pool // (2 * sizes.sequences) * BLOCK_SIZE), f"sequence-{seed}")
    while True:
        reports = {name: timed(pool.check) for name, pool in pools.items()}
        assert all(report.ok for _, report in reports.values())
        yield {f"check {name}": took / 1_000 for name, (took, _) in reports.items()}


def memory(sizes: Sizes) -> Iterator[Figures]:
    """Bytes per block that Python allocated for a pool, from tracemalloc."""
    figures: Figures = {}
    for index, line in ((IndexKind.HASH, "bytes warm"), (IndexKind.RADIX, "bytes radix")):
        tracemalloc.start()
        pool = open_pool(sizes.warm_pool, index)
        figures["bytes opened"] = tracemalloc.get_traced_memory()[0] / sizes.warm_pool
        fill(pool, sizes)
        figures[line] = tracemalloc.get_traced_memory()[0] / sizes.warm_pool
        tracemalloc.stop()
        del pool
    yield from repeat(figures)


CASES: dict[str, Case] = {
    "blocks": blocks,
    "verbs": verbs,
    "prompt": long_prompt,
    "decode": decode,
    "evict": evict,
    "fork": fork,
    "check": check,
    "memory": memory,
}
ALONE = {"fork", "check"}
"""Cases that vLLM has no counterpart of."""


# The comparison.


def measure(sides: dict[str, Side], rounds: int) -> Samples:
    """All rounds of all lines by side. The sides take turns, and turns in going first."""
    samples: Samples = {name: defaultdict(list) for name in sides}
    for case in CASES:
        names = [name for name in sides if name == OURS or case not in ALONE]
        for _ in range(rounds):
            for name in names:
                for line, figure in sides[name].round(case).items():
                    samples[name][line].append(figure)
            names.reverse()
    return samples


def summarise(samples: Samples, sizes: Sizes, faster: str) -> dict[str, Any]:
    """The result as JSON: one entry for each line, the scalings, and every part of vLLM's lines.

    faster: the goal of the lines that vLLM has too.
    """
    medians = {name: {line: median(figures) for line, figures in lines.items()} for name, lines in samples.items()}
    ours, peer = medians[OURS], medians.get(PEER, {})
    lines = []
    for line in LINES:
        entry: dict[str, Any] = {"line": line.title.format(**asdict(sizes)), "unit": line.unit, OURS: ours[line.key]}
        for column, key in ((PEER, line.key), ("vllm_default", f"{line.key} sha256")):
            if key in peer:
                ratios = map(truediv, samples[PEER][key], samples[OURS][line.key])
                entry |= {column: peer[key], f"{column}_ratio": median(ratios)}
        lines.append(entry | {"goal": line.goal or (faster if PEER in entry else "")})
    scalings = {
        name: {side: figures[large] / figures[small] for side, figures in medians.items() if large in figures}
        for name, (large, small) in SCALINGS.items()
    }
    return {"lines": lines, "large_to_small": scalings, "vllm_parts": peer}


def show(result: dict[str, Any]) -> None:
    """Prints the result as a table."""
    console = Console(width=max(Console().width, 140))
    table = Table(title=f"Octavo ({result['build']}) and vLLM: medians of {result['rounds']} rounds")
    table.add_column("", no_wrap=True)
    for column in ("Octavo", "vLLM", "faster", "default", "faster", "unit", "goal"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in result["lines"]:
        figures = [_shown(line, name) for name in (OURS, PEER, "vllm_ratio", "vllm_default", "vllm_default_ratio")]
        table.add_row(line["line"], *figures, line["unit"], line["goal"])
    console.print(table)
    for name, sides in result["large_to_small"].items():
        ratios = ", ".join(f"{side} {ratio:.2f}" for side, ratio in sides.items())
        console.print(f"{name}, large pool to small: {ratios} (1 when the size does not matter)")
    console.print(f"load average {result['load_average']:.1f} on {os.cpu_count()} cores")
    if reason := result["vllm_skipped"]:
        console.print(f"vLLM was skipped: {reason}. `make bench-peers VLLM_VENV=DIR` makes an environment for it.")


def _shown(line: dict[str, Any], column: str) -> str:
    if column not in line:
        return ""
    digits = 2 if column.endswith("ratio") else 0 if line[column] >= 100 else 1
    return f"{line[column]:,.{digits}f}"


@contextmanager
def on_one_core() -> Iterator[None]:
    """Keeps this process, and what it starts, on one of its cores; elsewhere than on Linux it changes nothing."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@on_one_core()
def run(venv: Path | None, rounds: int, sizes: Sizes) -> dict[str, Any]:
    """Measures both sides, or Octavo's alone when vLLM cannot be had."""
    sides: dict[str, Side] = {OURS: LocalSide(CASES, sizes)}
    versions, skipped = None, ""
    try:
        sides[PEER] = peer = VllmSide(venv, sizes)
        versions = peer.versions
    except Skipped as reason:
        skipped = str(reason)
    try:
        samples = measure(sides, rounds)
    finally:
        for side in sides.values():
            side.close()
    build = "compiled" if Path(kvmanager.pool.__file__).suffix == ".so" else "plain Python"
    return {
        "build": build,
        "python": platform.python_version(),
        "vllm": versions,
        "vllm_skipped": skipped,
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
        **summarise(samples, sizes, TIMES_FASTER[build]),
    }


def main(
    vllm_venv: Annotated[Path | None, typer.Option(help="Environment with vLLM; without it Octavo is alone.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = 21,
    divide: Annotated[int, typer.Option(min=1, help="Divide all sizes by this: a try-out, no measurement.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measures the books and vLLM's block manager in turn."""
    result = run(vllm_venv, rounds, Sizes().divided(divide))
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    typer.run(main)
