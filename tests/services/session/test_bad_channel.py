"""An engine over a channel that does everything a channel may do: the answers are those of the undisturbed run."""

from __future__ import annotations

import random

import pytest

from kvmanager.runner_pool import RunnerPool
from kvmanager.types import BASE_SCOPE, IndexKind
from model_runner.engine_types import EngineState
from model_runner.request import BeamSearch
from services.cache_options import CacheOptions
from tests.model_runner.naive_beams import naive_search
from tests.model_runner.step_modes import StepMode, in_mode
from tests.model_runner.toy_model import Model, answer, habitual_logits, next_logits
from tests.services.session.bad_channel import FakeClock, FakeServer, Faults
from tests.services.session.stepped_engine import Bench

ROUGH = Faults(lost=0.03, doubled=0.05, delayed=0.2, delay=0.1, cut=0.01)


def test_an_undisturbed_run() -> None:
    bench = Bench(FakeServer(FakeClock()))
    bench.until_served()
    prompt = list(range(10))
    bench.submit("a", prompt, 20)
    bench.until_all_ended()
    assert bench.tokens("a") == answer(prompt, 20)
    bench.assert_books_agree()
    assert bench.states == [EngineState.SERVING]


def test_guesses_of_an_undisturbed_run_cost_no_session() -> None:
    """Blocks for guesses are told and taken back, asks for room are under way meanwhile, and both sides agree."""
    bench = Bench(FakeServer(FakeClock()), model=habitual_logits, num_blocks=120, speculative_tokens=6)
    bench.until_served()
    prompts = {str(number): list(range(number, 20 + 2 * number)) for number in range(6)}
    for name, prompt in prompts.items():
        bench.submit(name, prompt, 40)
    while bench.engine.requests():
        bench.turn(3)
        bench.books._opened.settle(1.0)
        bench.assert_books_agree()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == answer(prompt, 40, model=habitual_logits)
    assert bench.server.truncations > 0
    assert bench.server.refusals == []
    assert bench.books.status().restores == 0


ROUGH = Faults(lost=0.03, doubled=0.05, delayed=0.2, delay=0.1, cut=0.01)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("lease_blocks", [0, 4, 16])
def test_an_undisturbed_beam_search(width: int, lease_blocks: int) -> None:
    """Beams are forked in any step, and never while an answer is awaited that would change their blocks."""
    bench = Bench(FakeServer(FakeClock()), lease_blocks=lease_blocks)
    bench.until_served()
    prompt = list(range(10))
    bench.submit("a", prompt, 30, beam_search=BeamSearch(width))
    bench.until_all_ended()
    assert bench.tokens("a") == list(naive_search(prompt, width, 30)[0][1])
    bench.assert_books_agree()
    assert bench.states == [EngineState.SERVING]
    assert bench.books.status().restores == 0


@pytest.mark.parametrize("lease_blocks", [0, 4, 8])
@pytest.mark.parametrize("width", [2, 3, 6])
def test_a_beam_search_that_fills_the_pool(width: int, lease_blocks: int) -> None:
    """16 blocks of 4, spare ones among them: the prompt fills 2, and each beam has its part of the rest."""
    bench = Bench(FakeServer(FakeClock()), num_blocks=17, lease_blocks=lease_blocks)
    bench.until_served()
    prompt = list(range(9))
    bench.submit("a", prompt, 1_000, beam_search=BeamSearch(width))
    bench.until_all_ended()
    assert bench.tokens("a") == list(naive_search(prompt, width, (2 + 14 // width) * 4 - 9 + 1)[0][1])
    bench.assert_books_agree()


@pytest.mark.parametrize("seed", range(6))
def test_beam_searches_over_a_rough_channel(seed: int) -> None:
    rng = random.Random(seed)
    server = FakeServer(FakeClock(), rng=random.Random(seed + 1), faults=ROUGH)
    bench = Bench(server, num_blocks=rng.choice([40, 65]), max_sequences=8)
    bench.until_served()
    plans = {str(number): ([rng.randrange(40) for _ in range(9)], 2 + number % 3) for number in range(12)}
    for number, (prompt, width) in plans.items():
        bench.submit(number, prompt, 12, beam_search=BeamSearch(width))
        bench.turn(rng.randrange(8))
        if rng.random() < 0.2:
            server.kill()
            bench.turn(rng.randrange(20))
            server.start()
    bench.until_all_ended()
    for number, (prompt, width) in plans.items():
        assert bench.tokens(number) == list(naive_search(prompt, width, 12)[0][1])
    bench.assert_books_agree()
    assert not bench.mirror.live


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX, IndexKind.NONE])
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_and_nothing_is_wrong(seed: int, index: IndexKind) -> None:
    check_answers(seed, index, next_logits)


@pytest.mark.parametrize("index", [IndexKind.HASH, IndexKind.RADIX])
@pytest.mark.parametrize("seed", range(8, 12))
def test_nor_while_steps_are_planned_ahead(seed: int, index: IndexKind) -> None:
    with in_mode(StepMode.AHEAD):
        check_answers(seed, index, next_logits)


@pytest.mark.parametrize("seed", range(8))
def test_guesses_are_taken_back_whatever_happens_to_the_session(seed: int) -> None:
    """The model repeats itself, so that guesses are right and wrong, with blocks that are told and taken back."""
    bench = check_answers(seed, IndexKind.HASH, habitual_logits, speculative_tokens=6)
    usages = [item.usage for items in bench.items.values() for item in items if item.usage is not None]
    accepted, drafted = sum(each.accepted_tokens for each in usages), sum(each.drafted_tokens for each in usages)
    assert 0 < accepted < drafted
    assert bench.server.truncations > 0


def check_answers(seed: int, index: IndexKind, model: Model, **scheduling: int) -> Bench:
    """40 requests over a rough channel, with aborts, kills and stops: all that ends is right, and nothing is left."""
    rng = random.Random(seed)
    server = FakeServer(FakeClock(), rng=random.Random(seed + 1), faults=ROUGH)
    bench = Bench(
        server,
        num_blocks=rng.choice([30, 65]),
        cache=CacheOptions(index=index),
        max_sequences=8,
        model=model,
        **scheduling,
    )
    bench.until_served()
    shared = [rng.randrange(40) for _ in range(24)]
    plans = {}
    for number in range(40):
        prompt = shared[: rng.randrange(len(shared))] + [rng.randrange(40) for _ in range(rng.randrange(1, 12))]
        plans[str(number)] = (prompt, rng.randrange(1, 30), rng.choice([1, 1, 1, 3]))
    aborted = set()
    for number, (prompt, count, choices) in plans.items():
        bench.submit(number, prompt, count, num_choices=choices)
        bench.turn(rng.randrange(6))
        if rng.random() < 0.1:
            bench.engine.abort([number])
            aborted.add(number)
        if rng.random() < 0.05:
            server.kill()
            bench.turn(rng.randrange(20))
            server.start()
        if rng.random() < 0.05:
            server.stop()
            bench.turn(rng.randrange(100))
            server.go_on()
    bench.until_all_ended()
    for number, (prompt, count, choices) in plans.items():
        if number not in aborted:
            for choice in range(choices):
                assert bench.tokens(number, choice) == answer(prompt, count, model=model)
    bench.assert_books_agree()
    assert not bench.mirror.live
    assert server.refusals == []
    return bench


@pytest.mark.parametrize("seed", range(4))
def test_what_is_to_leave_nothing_leaves_nothing_through_restarts(seed: int) -> None:
    """Half of the requests leave nothing: all that can be found in the end is of the others."""
    rng = random.Random(seed)
    server = FakeServer(FakeClock(), rng=random.Random(seed + 1), faults=ROUGH)
    bench = Bench(server, max_sequences=8)
    bench.until_served()
    shared = [rng.randrange(40) for _ in range(12)]
    loud: list[list[int]] = []
    for number in range(24):
        prompt, quiet = [*shared, *rng.choices(range(40), k=rng.randrange(1, 12))], number % 2 == 1
        bench.submit(str(number), prompt, 12, skip_cache_write=quiet, num_choices=rng.choice([1, 1, 3]))
        if not quiet:
            loud.append([*prompt, *answer(prompt, 12)])
        bench.turn(rng.randrange(6))
        if rng.random() < 0.15:
            server.kill()
            bench.turn(rng.randrange(20))
            server.start()
    bench.until_all_ended()
    bench.assert_books_agree()
    pool = server.manager.pool("default")
    found = {name for chain in pool.snapshot() for name in chain.names}
    assert found
    assert found <= {name for tokens in loud for name in names_of(pool, tokens)}


def names_of(pool: RunnerPool, tokens: list[int]) -> list[bytes]:
    chain = pool._chain(tokens, BASE_SCOPE, ())
    return [chain.name(index) for index in range(len(tokens) // 4)]
