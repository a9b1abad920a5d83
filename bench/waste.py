"""Memory that blocks waste, and memory that sharing saves, counted in the real books beside the published figures.

    python -m bench.waste --docs docs/waste.md

Requests have the mean lengths of the paper's two data sets; each is played token by token, and after every token the
books are read. Nothing is computed from a formula. The published figures are those of Kwon et al., Efficient Memory
Management for Large Language Model Serving with PagedAttention (SOSP 2023).
"""

from __future__ import annotations

import itertools
import json
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import NormalDist, fmean
from typing import Annotated

import typer

from bench.beam_search import BeamSearch, SurvivorRule, each_its_own, ranked, scored, stays, uniform
from kvmanager import Pool
from kvmanager.types import Append, Occupancy, PoolSpec

SEED = 2309
SIGMA = 1.0
"""Of the logarithm of a length."""
MAX_LENGTH = 1024
"""Tokens of a prompt, and of an output; longer ones are cut to it."""
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
SHARING_BLOCK_SIZE = 16
WIDTHS = (2, 4, 6)
PUBLISHED_USEFUL = 0.963
BEAM_RULES: dict[str, SurvivorRule] = {
    "stays 99 %": stays(0.99),
    "stays 90 %": stays(0.9),
    "uniform": uniform,
    "ranked": ranked,
    "scored": scored,
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths in tokens, how many requests and beam searches stand for them, and the savings published for them.

    Savings are shares: one for each of WIDTHS, or the two ends of a range.
    """

    name: str
    mean_prompt: float
    mean_output: float
    requests: int
    beam_requests: int
    published_parallel: tuple[float, ...]
    published_beam: tuple[float, ...]


ALPACA = Lengths("Alpaca", 19.31, 58.45, 600, 120, (0.0609, 0.0853, 0.0979), (0.3756, 0.5313, 0.5516))
SHAREGPT = Lengths("ShareGPT", 161.31, 337.99, 150, 32, (0.162, 0.305), (0.443, 0.663))


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of a prompt and of its output."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a whole, from 0 to 1, and its standard error over the requests."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class Saving:
    """What sharing saves at one width.

    saved: share of the blocks that the same block tables would use without sharing, over all steps.
    most_new_blocks: blocks taken in one step, at most. recomputed_prompt_tokens: over all steps.
    """

    width: int
    saved: Share
    most_new_blocks: int
    recomputed_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one kind of lengths: the means that were played, waste by block size, and savings by width."""

    lengths: Lengths
    mean_prompt: float
    mean_output: float
    waste: dict[int, Share]
    parallel: tuple[Saving, ...]
    beam: dict[str, tuple[Saving, ...]]


# Requests.


def draw_requests(lengths: Lengths, count: int) -> list[Request]:
    """`count` requests, prompt and output drawn independently; the same ones at every call."""
    rng = Random(f"{SEED} {lengths.name}")
    prompts = _draw(lengths.mean_prompt, count, rng)
    outputs = _draw(lengths.mean_output, count, rng)
    return [Request(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def _draw(mean: float, count: int, rng: Random) -> list[int]:
    """Log-normal lengths: one from each of `count` equally likely slices, so that few requests have a fair tail."""
    logarithm = NormalDist(math.log(mean) - SIGMA**2 / 2, SIGMA)
    drawn = [math.exp(logarithm.inv_cdf((index + rng.random()) / count)) for index in range(count)]
    rng.shuffle(drawn)
    return [min(MAX_LENGTH, max(1, round(length))) for length in drawn]


# Counting.


def waste(requests: Iterable[Request], block_size: int) -> Share:
    """Share of the reserved slots that hold no token, over all decode steps of all requests."""
    pool = Pool(PoolSpec(_blocks(1, block_size), block_size))
    token_ids = itertools.count()
    counts = []
    for request in requests:
        readings = list(_decode(pool, request, token_ids))
        reserved = sum(reading.reserved_tokens for reading in readings)
        counts.append((reserved - sum(reading.stored_tokens for reading in readings), reserved))
    return _share(counts)


def _decode(pool: Pool, request: Request, token_ids: Iterator[int]) -> Iterator[Occupancy]:
    """What the books say after each output token is told, granted its slot and computed."""
    pool.allocate("request", list(itertools.islice(token_ids, request.prompt)), skip_cache_read=True)
    for computed in range(request.prompt, request.prompt + request.output):
        pool.append([Append("request", (next(token_ids),), computed)])
        pool.append([Append("request", (), computed + 1)])
        yield pool.occupancy()
    pool.free([Append("request")])


def saving(requests: Iterable[Request], width: int, rule: SurvivorRule) -> Saving:
    """What the requests save by sharing when each is a search of `width` sequences over its output's length."""
    pool = Pool(PoolSpec(_blocks(width, SHARING_BLOCK_SIZE), SHARING_BLOCK_SIZE))
    token_ids, rng = itertools.count(), Random(SEED)
    counts, most_new_blocks, recomputed = [], 0, 0
    for number, request in enumerate(requests):
        search = BeamSearch(pool, str(number), list(itertools.islice(token_ids, request.prompt)), token_ids)
        survivors = rule(width, rng)
        steps = [search.step(survivors(len(search.live))) for _ in range(request.output)]
        search.end()
        unshared = sum(step.table_blocks for step in steps)
        counts.append((unshared - sum(step.held_blocks for step in steps), unshared))
        most_new_blocks = max(most_new_blocks, *(step.new_blocks for step in steps))
        recomputed += sum(step.recomputed_prompt_tokens for step in steps)
    return Saving(width, _share(counts), most_new_blocks, recomputed)


def _share(counts: Sequence[tuple[int, int]]) -> Share:
    """All parts by all wholes, of one (part, whole) a request. The error is that of a ratio of independent draws."""
    whole = sum(whole for _, whole in counts)
    share = sum(part for part, _ in counts) / whole
    return Share(share, math.hypot(*(part - share * whole for part, whole in counts)) / whole)


def _blocks(width: int, block_size: int) -> int:
    """Blocks that suffice for `width` sequences that share nothing, the null block included."""
    return 1 + width * -(-2 * MAX_LENGTH // block_size)


def measure(lengths: Lengths) -> Result:
    """All figures for lengths of one kind."""
    requests = draw_requests(lengths, lengths.requests)
    searches = draw_requests(lengths, lengths.beam_requests)
    return Result(
        lengths,
        fmean(request.prompt for request in requests),
        fmean(request.output for request in requests),
        {block_size: waste(requests, block_size) for block_size in BLOCK_SIZES},
        tuple(saving(requests, width, each_its_own) for width in WIDTHS),
        {name: tuple(saving(searches, width, rule) for width in WIDTHS) for name, rule in BEAM_RULES.items()},
    )


# The page.

PAGE = """\
# Memory wasted and memory saved

    python -m bench.waste --docs docs/waste.md

That command counts everything on this page in the real books (`kvmanager.Pool`) and writes the page; no model runs. The
published figures are those of Kwon et al., *Efficient Memory Management for Large Language Model Serving with
PagedAttention* (SOSP 2023). All figures are in %, with their standard error over the requests.

## Waste by block size

Waste is the share of reserved slots that hold no token. It is read after each output token of each request and taken
over all these readings together, so a request weighs as much as the steps that it lives for.

{waste_table}

{waste_meaning}

This is the least that a server wastes. What it holds besides, spare blocks and blocks that are granted before they are
needed, is counted in [benchmarks.md](benchmarks.md#useful-share-of-kv-memory).

## Parallel sampling

Several samples share the blocks of their prompt. Saved is the share of blocks that sharing spares, of those that the
same block tables would use without it, over all steps. Blocks hold {block_size} tokens; all samples of a prompt are
equally long and end together.

{parallel_table}

With n samples the saving is (n - 1)/n of the share that whole prompt blocks have in all blocks: it says how long
prompts are beside outputs, and little about the books.

## Beam search

Saved as above. The published searches ran on real models. Here the survivors of each step are drawn by a rule, and the
saving depends on the rule; none was fitted to the published figures. All first survivors are children of the prompt.
After that:

- *stays 99 %*, *stays 90 %*: a survivor is its predecessor's child with this chance, else the child of any sequence
  alike.
- *uniform*: a survivor is the child of any sequence alike.
- *ranked*: a survivor is a child of the first sequence with twice the chance of the second, and so on.
- *scored*: the k most probable continuations survive, by a made-up model whose next token takes a uniform share of all
  probability, the one after it a uniform share of what is left, and so on, afresh for each sequence and step.

The bounds: where nobody ever dies the search is parallel sampling and saves no more than that, and with k sequences
nothing saves more than (k - 1)/k, which is 50, 75 and 83.33.

{beam_table}

A search saves the more, the fewer steps ago all survivors had one ancestor: from there back they share every block.
Where a rule saves more than was published, the real searches probably kept distant relatives for longer than the rule
does; it doesn't mean that these books share better. Nor does any row confirm the published ones: *stays 90 %* comes
near Alpaca's and is far from ShareGPT's.

{beam_bounds}

## What is assumed

- Lengths are log-normal with a standard deviation of {sigma:g} of the logarithm. Only the means are the paper's: the
  shape is an assumption, and so is that prompt and output are independent.
- Prompts and outputs are each cut to {max_length:,} tokens, which makes the means that were played smaller.
- A length is drawn from each of as many equally likely slices of the distribution as there are requests, which makes
  the true error smaller than the one given. Seed {seed}.
- Each request is counted alone, with tokens that no other has: no prefix is shared between requests.

{played_table}
"""


def page(results: Sequence[Result]) -> str:
    """The page in Markdown, of the Alpaca-like and the ShareGPT-like lengths."""
    alpaca, sharegpt = results
    return PAGE.format(
        waste_table=_waste_table(results),
        waste_meaning=_waste_meaning(alpaca, sharegpt),
        block_size=SHARING_BLOCK_SIZE,
        parallel_table=_table(("lengths", *(f"n = {width}" for width in WIDTHS)), _parallel_rows(results)),
        beam_table=_table(("lengths", "survivors", *(f"k = {width}" for width in WIDTHS)), _beam_rows(results)),
        beam_bounds=_beam_bounds(results),
        sigma=SIGMA,
        max_length=MAX_LENGTH,
        seed=SEED,
        played_table=_played_table(results),
    )


def _waste_table(results: Sequence[Result]) -> str:
    rows = [(f"{result.lengths.name}-like", *map(_percent, result.waste.values())) for result in results]
    return _table(("lengths", *(f"block of {size}" for size in BLOCK_SIZES)), rows)


def _waste_meaning(alpaca: Result, sharegpt: Result) -> str:
    size = SHARING_BLOCK_SIZE
    return _paragraph(
        f"""Published: {PUBLISHED_USEFUL:.1%} of the memory is useful, so less than 4% is wasted. That is a statement
        about ShareGPT-like lengths: with them, blocks of {size} waste {sharegpt.waste[size].value:.1%}. With
        Alpaca-like lengths the same blocks waste {alpaca.waste[size].value:.1%}, because one block of each sequence is
        partly empty, and a short sequence has few others. A claim about waste has to name the lengths and the block
        size."""
    )


def _parallel_rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        yield f"{result.lengths.name}-like", *_saved(result.parallel)
        yield f"{result.lengths.name}, published", *_published(result.lengths.published_parallel)


def _beam_rows(results: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for result in results:
        for name, savings in result.beam.items():
            yield f"{result.lengths.name}-like", name, *_saved(savings)
        yield f"{result.lengths.name}, published", "real", *_published(result.lengths.published_beam)


def _beam_bounds(results: Sequence[Result]) -> str:
    savings = [saving for result in results for savings in result.beam.values() for saving in savings]
    most = {width: max(saving.most_new_blocks for saving in savings if saving.width == width) for width in WIDTHS}
    recomputed = sum(saving.recomputed_prompt_tokens for saving in savings)
    return _paragraph(
        f"""Over all these searches, the most new blocks in one step were
        {", ".join(f"{blocks} with k = {width}" for width, blocks in most.items())}; prompt tokens that were computed
        again: {recomputed}."""
    )


def _played_table(results: Sequence[Result]) -> str:
    header = ("lengths", "mean in", "published", "mean out", "published", "requests", "beam searches")
    rows = [
        (
            f"{result.lengths.name}-like",
            f"{result.mean_prompt:.2f}",
            str(result.lengths.mean_prompt),
            f"{result.mean_output:.2f}",
            str(result.lengths.mean_output),
            str(result.lengths.requests),
            str(result.lengths.beam_requests),
        )
        for result in results
    ]
    return _table(header, rows)


def _saved(savings: Iterable[Saving]) -> Iterator[str]:
    return (_percent(saving.saved) for saving in savings)


def _percent(share: Share) -> str:
    return f"{share.value:.2%} ± {share.error:.2%}".replace("%", "")


def _published(shares: Sequence[float]) -> tuple[str, ...]:
    """A cell for each width; of a published range only the ends are known."""
    cells = tuple(f"{share:.2%}".removesuffix("%") for share in shares)
    return cells if len(cells) == len(WIDTHS) else (f"from {cells[0]}", "", f"to {cells[-1]}")


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()).replace("%", " %"), 120)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the page.")] = False,
    docs: Annotated[Path | None, typer.Option(help="Write the page to this file too.")] = None,
) -> None:
    """Counts waste and savings, and prints them as a page of Markdown."""
    results = [measure(lengths) for lengths in (ALPACA, SHAREGPT)]
    text = page(results)
    if docs is not None:
        docs.write_text(text, encoding="utf-8")
    typer.echo(json.dumps({result.lengths.name: asdict(result) for result in results}) if as_json else text)


if __name__ == "__main__":
    typer.run(main)
