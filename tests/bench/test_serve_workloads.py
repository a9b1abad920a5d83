"""What every system is given has the lengths, the sharing and the arrivals that it is said to have."""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import fmean, median

import pytest

from bench.serve.workloads import MAX_MODEL_LEN, NAMES, SMALL_CACHE_TOKENS, TRACE, Turn, Workload, build, warm_up


def turns(workload: Workload) -> list[Turn]:
    return [turn for conversation in workload.conversations for turn in conversation.turns]


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"), [("A", 64, 128, 64), ("B", 32, 544, 32), ("C", 1, 128, 128)]
)
def test_recorded_lengths(name: str, requests: int, prompt: int, output: int) -> None:
    found = build(name)
    assert [(len(turn.prompt), turn.max_tokens) for turn in turns(found)] == [(prompt, output)] * requests
    assert {each.arrival for each in found.conversations} == {0.0}
    assert found.output_tokens == requests * output


def test_b_shares_512_tokens_and_no_more() -> None:
    prompts = [turn.prompt for turn in turns(build("B"))]
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512:528] for prompt in prompts}) == len(prompts)


def test_the_warm_up_leaves_nothing_in_a_cache_that_a_workload_finds() -> None:
    first_blocks = {turn.prompt[:8] for turn in turns(warm_up())}
    assert not first_blocks & {turn.prompt[:8] for name in NAMES for turn in turns(build(name))}


def test_a_shares_no_block() -> None:
    assert len({turn.prompt[:16] for turn in turns(build("A"))}) == 64


def test_d_has_the_distribution_of_the_trace() -> None:
    lines = [json.loads(line) for line in TRACE.read_text().splitlines()]
    found = turns(build("D"))
    assert len(found) == 200
    # Medians do not feel the cut at the model's length. 200 draws: within some 10 % of the trace's.
    for lengths, field, divisor in (
        ([len(turn.prompt) for turn in found], "input_length", 64),
        ([turn.max_tokens for turn in found], "output_length", 6),
    ):
        assert median(lengths) == pytest.approx(median(line[field] for line in lines) / divisor, rel=0.2)
    assert all(len(turn.prompt) + turn.max_tokens <= MAX_MODEL_LEN for turn in found)


def test_d_arrives_over_twenty_seconds_in_a_cache_that_it_overfills() -> None:
    found = build("D")
    arrivals = [each.arrival for each in found.conversations]
    assert arrivals == sorted(arrivals)
    # Mean gap of 0.1 s; the error of a mean of 200 exponential gaps is 7 % of it.
    assert fmean(later - earlier for earlier, later in pairwise(arrivals)) == pytest.approx(0.1, rel=0.2)
    assert sum(len(turn.prompt) + turn.max_tokens for turn in turns(found)) > 5 * SMALL_CACHE_TOKENS
    assert found.cache_tokens == SMALL_CACHE_TOKENS


def test_e_is_chats_with_one_system_prompt() -> None:
    found = build("E")
    assert [len(each.turns) for each in found.conversations] == [4] * 16
    firsts = [each.turns[0].prompt for each in found.conversations]
    assert len({first[:128] for first in firsts}) == 1
    assert len({first[128:] for first in firsts}) == 16
    for each in found.conversations:
        assert sum(len(turn.prompt) + turn.max_tokens for turn in each.turns) <= MAX_MODEL_LEN


@pytest.mark.parametrize("name", NAMES)
def test_the_same_every_time_and_through_a_pipe(name: str) -> None:
    found = build(name)
    assert found == build(name)
    assert Workload.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_cut_workload_is_its_beginning() -> None:
    assert build("E").cut(2).conversations == build("E").conversations[:2]
    assert build("E").cut(0) == build("E")
