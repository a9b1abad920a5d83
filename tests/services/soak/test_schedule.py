"""Load and faults come out of the seed alone, and are of all kinds."""

from __future__ import annotations

from itertools import islice, pairwise, product

import pytest

from services.soak.faults import MESSAGE_FAULTS, FaultKind, fault_schedule
from services.soak.load import MAX_TOKENS, MOST_DRAWN, PROMPTS, SEARCH_TOKENS, SEARCH_WIDTH, Ending, Kind, requests_of

SEEDS = range(20)


def requests(seed: int, user: str, count: int = 200):
    return list(islice(requests_of(seed, user), count))


def test_a_seed_repeats_the_load():
    assert requests(7, "r0u1") == requests(7, "r0u1")
    assert requests(7, "r0u1") != requests(8, "r0u1")
    assert [each.prompt for each in requests(7, "r0u1")] != [each.prompt for each in requests(7, "r1u1")]


def test_the_load_is_of_all_kinds():
    load = requests(7, "r0u1", 1000)
    assert {each.prompt for each in load} == set(range(len(PROMPTS)))
    assert {each.ending for each in load} == set(Ending)
    assert {each.choices for each in load} == {1, 2, 3}
    assert len({each.salt for each in load}) > 1
    assert len({each.priority for each in load}) > 1
    assert len({each.name for each in load}) == len(load)
    for each in load:
        assert 1 <= each.max_tokens <= MAX_TOKENS
        assert (each.seconds > 0) == (each.ending is Ending.DEADLINE)
        leaves = each.ending in (Ending.ABORT, Ending.DROP)
        assert (each.after > 0) == (leaves and each.kind is Kind.SAMPLED)
        assert (each.patience > 0) == (leaves and each.kind is not Kind.SAMPLED)
        assert each.after <= each.max_tokens


def test_some_requests_search_and_some_want_the_best_of_several():
    load = requests(7, "r0u1", 1000)
    assert {(each.kind, each.ending) for each in load} == set(product(Kind, Ending))
    for each in load:
        if each.kind is Kind.BEAMS:
            assert (each.max_tokens, each.drawn) == (SEARCH_TOKENS, 0)
            assert each.choices <= SEARCH_WIDTH
        elif each.kind is Kind.BEST_OF:
            assert each.choices < each.drawn <= MOST_DRAWN
        else:
            assert each.drawn == 0


def test_many_prompts_begin_alike():
    beginnings = {prompt[:100] for prompt in PROMPTS if len(prompt) > 150}
    assert len(beginnings) == 1
    assert len(set(PROMPTS)) == len(PROMPTS)


def test_a_seed_repeats_the_faults():
    assert fault_schedule(3, 120, 2) == fault_schedule(3, 120, 2)
    assert fault_schedule(3, 120, 2) != fault_schedule(4, 120, 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_minutes_have_faults_of_all_kinds(seed: int):
    faults = fault_schedule(seed, 120, 2)
    assert {fault.kind for fault in faults} == set(FaultKind)
    assert all(fault.at + fault.seconds <= 120 for fault in faults)
    for before, after in pairwise(faults):
        assert before.at + before.seconds + 2 <= after.at


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_say_how_much_and_whom(seed: int):
    for fault in fault_schedule(seed, 600, 3):
        assert fault.runner in range(3)
        assert (0 < fault.share <= 0.5) == (fault.kind in MESSAGE_FAULTS)
        assert fault.seconds <= 10


def test_the_manager_is_stopped_for_up_to_ten_seconds():
    stops = [
        fault.seconds
        for seed in range(100)
        for fault in fault_schedule(seed, 120, 2)
        if fault.kind is FaultKind.STOP_MANAGER
    ]
    assert max(stops) > 9
    assert min(stops) < 2
