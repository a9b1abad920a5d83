"""Waste and savings as the books count them are what arithmetic says, and a beam search takes no more than it must."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bench import waste as bench_waste
from bench.beam_search import BeamSearch, SurvivorRule, each_its_own, ranked, scored, stays, uniform
from bench.waste import ALPACA, BLOCK_SIZES, SHAREGPT, WIDTHS, Lengths, Request, draw_requests, saving, waste
from kvmanager import Pool
from kvmanager.types import PoolSpec

WIDTH = 4
STEPS = 64
RULES = [each_its_own, stays(0.99), stays(0.9), uniform, ranked, scored]

requests = st.lists(st.builds(Request, st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4)


def lengths_over_time(request: Request) -> range:
    """Tokens of a sequence at each reading."""
    return range(request.prompt + 1, request.prompt + request.output + 1)


# Waste.


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("length", [2, 8, 15, 16, 17, 128, 129, 2048])
def test_waste_of_one_length(length: int, block_size: int) -> None:
    blocks = -(-length // block_size)
    # One output token makes one reading, of `length` tokens.
    measured = waste([Request(length - 1, 1)], block_size)
    assert measured.value == pytest.approx(1 - length / (blocks * block_size))


@given(requests, st.sampled_from(BLOCK_SIZES))
@settings(max_examples=30, deadline=None)
def test_waste_over_time(played: list[Request], block_size: int) -> None:
    lengths = [length for request in played for length in lengths_over_time(request)]
    reserved = sum(-(-length // block_size) * block_size for length in lengths)
    assert waste(played, block_size).value == pytest.approx(1 - sum(lengths) / reserved)


@pytest.mark.parametrize(
    ("lengths", "requests", "counted"),
    [
        (ALPACA, 200, (0, 3.51, 7.22, 13.93, 25.67, 44.29)),
        (SHAREGPT, 40, (0, 0.82, 1.74, 3.54, 6.93, 13.01)),
    ],
)
def test_waste_agrees_with_an_independent_count(lengths: Lengths, requests: int, counted: tuple[float, ...]) -> None:
    """`counted`: % by block size, from plain arithmetic over 1,500 requests drawn independently."""
    drawn = draw_requests(lengths, requests)
    for block_size, percent in zip(BLOCK_SIZES, counted, strict=True):
        measured = waste(drawn, block_size)
        assert measured.value == pytest.approx(percent / 100, abs=2 * measured.error + 1e-9)


# Savings.


@pytest.mark.parametrize("width", WIDTHS)
def test_parallel_sampling_of_whole_blocks(width: int) -> None:
    """Two whole prompt blocks, then one block a sample: 2 + n blocks where 3n would be used."""
    measured = saving([Request(32, 16)], width, each_its_own)
    assert measured.saved.value == pytest.approx(1 - (2 + width) / (3 * width))
    assert measured.most_new_blocks == width
    assert measured.recomputed_prompt_tokens == 0


@given(requests, st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_parallel_sampling_shares_whole_prompt_blocks(played: list[Request], width: int) -> None:
    shared = used = 0
    for request in played:
        for length in lengths_over_time(request):
            used += width * -(-length // 16)
            shared += (width - 1) * (request.prompt // 16)
    assert saving(played, width, each_its_own).saved.value == pytest.approx(shared / used)


@pytest.mark.parametrize(
    ("lengths", "requests", "counted"), [(ALPACA, 150, (5.36, 8.04, 8.93)), (SHAREGPT, 25, (17.29, 25.94, 28.82))]
)
def test_parallel_sampling_agrees_with_an_independent_count(
    lengths: Lengths, requests: int, counted: tuple[float, ...]
) -> None:
    drawn = draw_requests(lengths, requests)
    for width, percent in zip(WIDTHS, counted, strict=True):
        saved = saving(drawn, width, each_its_own).saved
        assert saved.value == pytest.approx(percent / 100, abs=2 * saved.error)


@pytest.mark.parametrize("rule", RULES[1:])
def test_beam_search_saves_more_than_parallel_sampling_and_less_than_all(rule: SurvivorRule) -> None:
    played = [Request(19, 58), Request(160, 200)]
    saved = saving(played, WIDTH, rule).saved.value
    assert saving(played, WIDTH, each_its_own).saved.value < saved < (WIDTH - 1) / WIDTH


# Requests.


@pytest.mark.parametrize("lengths", [ALPACA, SHAREGPT])
def test_drawn_lengths_have_the_means_and_come_again(lengths: Lengths) -> None:
    drawn = draw_requests(lengths, 2_000)
    assert drawn == draw_requests(lengths, 2_000)
    tokens = [length for request in drawn for length in (request.prompt, request.output)]
    assert min(tokens) >= 1
    assert max(tokens) <= 1_024
    # Longer ones are cut, which takes a tenth off ShareGPT's outputs and hardly anything off the others.
    prompt_mean = sum(request.prompt for request in drawn) / len(drawn)
    output_mean = sum(request.output for request in drawn) / len(drawn)
    assert 0.96 * lengths.mean_prompt < prompt_mean < 1.01 * lengths.mean_prompt
    assert 0.88 * lengths.mean_output < output_mean < 1.01 * lengths.mean_output


# Beam search.


def distinct_blocks(lineages: list[list[int]], block_size: int) -> int:
    """Blocks that hold different tokens. No token comes twice, so a block's last one tells all before it."""
    return len(
        {
            lineage[start : start + block_size][-1]
            for lineage in lineages
            for start in range(0, len(lineage), block_size)
        }
    )


def play(prompt_tokens: int, block_size: int, all_parents: list[list[int]]) -> None:
    """Plays a search of width 4 and checks every step; at the end nothing is left."""
    pool = Pool(PoolSpec(1 + WIDTH * -(-(prompt_tokens + STEPS) // block_size), block_size))
    token_ids = itertools.count(prompt_tokens)
    search = BeamSearch(pool, "search", range(prompt_tokens), token_ids)
    lineages = [list(range(prompt_tokens))]
    expected_token = prompt_tokens
    for parents in all_parents:
        step = search.step(parents)
        lineages = [lineages[parent] + [expected_token + index] for index, parent in enumerate(parents)]
        expected_token += len(parents)
        assert step.new_blocks <= WIDTH
        assert step.copies <= WIDTH - 1
        assert step.recomputed_prompt_tokens == 0
        # Nothing but each survivor's new token is left to compute.
        sequences = [pool.sequence(sequence_id) for sequence_id in search.live]
        assert [sequence.num_tokens - sequence.computed for sequence in sequences] == [1] * WIDTH
        assert step.held_blocks == distinct_blocks(lineages, block_size)
        assert step.table_blocks == WIDTH * -(-len(lineages[0]) // block_size)
    assert pool.check().ok
    search.end()
    occupancy = pool.occupancy()
    assert (occupancy.held_blocks, occupancy.sequences) == (0, 0)
    assert occupancy.free_blocks + occupancy.cached_blocks == occupancy.usable_blocks
    assert pool.check().ok


prompt_lengths = st.integers(1, 70)
block_sizes = st.sampled_from([1, 2, 8, 16, 32])
any_parents = st.lists(
    st.lists(st.integers(0, WIDTH - 1), min_size=WIDTH, max_size=WIDTH), min_size=STEPS - 1, max_size=STEPS - 1
)


@given(prompt_lengths, block_sizes, st.sampled_from(RULES), st.integers(0, 1 << 32))
@settings(max_examples=150, deadline=None)
def test_beam_of_four_by_the_rules(prompt_tokens: int, block_size: int, rule: SurvivorRule, seed: int) -> None:
    survivors = rule(WIDTH, Random(seed))
    play(prompt_tokens, block_size, [survivors(1), *(survivors(WIDTH) for _ in range(STEPS - 1))])


@given(prompt_lengths, block_sizes, any_parents)
@settings(max_examples=60, deadline=None)
def test_beam_of_four_with_any_parents(prompt_tokens: int, block_size: int, parents: list[list[int]]) -> None:
    play(prompt_tokens, block_size, [[0] * WIDTH, *parents])


# The command.


def test_command_writes_the_page_and_prints_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(bench_waste.main)
    monkeypatch.setattr(bench_waste, "ALPACA", _few(ALPACA))
    monkeypatch.setattr(bench_waste, "SHAREGPT", _few(SHAREGPT))
    docs = tmp_path / "waste.md"
    result = CliRunner().invoke(app, ["--json", "--docs", str(docs)])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert set(figures) == {"Alpaca", "ShareGPT"}
    assert figures["Alpaca"]["waste"]["1"]["value"] == 0
    text = docs.read_text(encoding="utf-8")
    assert "python -m bench.waste --docs docs/waste.md" in text
    for published in ("96.3 %", "| 6.09 | 8.53 | 9.79 |", "| 37.56 | 53.13 | 55.16 |"):
        assert published in text
    assert max(map(len, text.splitlines())) <= 120


def _few(lengths: Lengths) -> Lengths:
    return replace(lengths, requests=4, beam_requests=2)
