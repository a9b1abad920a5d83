"""Draws against closed-form distributions, independence of the batch, and log-probabilities against math.log."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner import native
from model_runner.native import sampling as kernels
from model_runner.request import PositionLogprobs, SamplingParams
from model_runner.sampling import logprobs, sample
from model_runner.sampling_cpu import logprobs_by_rows, sample_by_rows
from model_runner.sampling_device import logprobs_at_once, sample_at_once
from model_runner.sampling_rows import SamplingRows
from tests.model_runner.native_support import INSTRUCTION_SETS, using

DRAWS = 100_000
FEWER_DRAWS = 10_000
"""For what goes row by row in Python."""
PROBABILITIES = [0.05, 0.3, 0.02, 0.2, 0.1, 0.25, 0.08]

# Upper critical values of the chi-square distribution at 0.001, by degrees of freedom:
# NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.4.
CHI_SQUARE_0_001 = {1: 10.828, 2: 13.816, 3: 16.266, 4: 18.467, 5: 20.515, 6: 22.458}


Sample = Callable[[torch.Tensor, SamplingRows], torch.Tensor]
Logprobs = Callable[[torch.Tensor, torch.Tensor, Sequence[int]], list[PositionLogprobs]]


def sample_by_kernels(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return kernels.draw(logits, rows, None, None)


def logprobs_by_kernels(logits: torch.Tensor, token_ids: torch.Tensor, counts: Sequence[int]) -> list[PositionLogprobs]:
    return kernels.logprobs(logits, torch.arange(len(logits)), token_ids, counts)


WITH_KERNELS = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")


@pytest.fixture(
    scope="module",
    params=[sample_by_rows, sample_at_once, pytest.param(sample_by_kernels, marks=WITH_KERNELS)],
    ids=["numpy", "torch", "kernels"],
)
def sample_of(request: pytest.FixtureRequest) -> Sample:
    """A CPU's way without kernels, a device's, and that of the kernels: the same draws."""
    return request.param


@pytest.fixture(
    scope="module",
    params=[logprobs_by_rows, logprobs_at_once, pytest.param(logprobs_by_kernels, marks=WITH_KERNELS)],
    ids=["numpy", "torch", "kernels"],
)
def logprobs_of(request: pytest.FixtureRequest) -> Logprobs:
    return request.param


def distribution(probabilities: list[float], params: SamplingParams) -> dict[int, float]:
    """What is left of each token's probability after temperature, top_k, top_p and min_p, one after the other."""
    powers = [p ** (1 / params.temperature) for p in probabilities]
    left = sorted(((w / sum(powers), -i) for i, w in enumerate(powers)), reverse=True)
    left = left[: params.top_k or len(left)]
    total = sum(w for w, _ in left)
    reached = [sum(w for w, _ in left[:i]) for i in range(len(left))]
    left = [each for each, before in zip(left, reached, strict=True) if before < params.top_p * total]
    left = [(w, i) for w, i in left if w >= params.min_p * left[0][0]]
    return {-i: w / sum(w for w, _ in left) for w, i in left}


def logits_of(probabilities: list[float], rows: int) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float().expand(rows, -1)


def rows_of(params: SamplingParams, count: int, seed: int = 0) -> SamplingRows:
    return SamplingRows.of([params] * count, [seed] * count, range(count))


def chi_square(counts: Counter[int], expected: dict[int, float]) -> float:
    draws = sum(counts.values())
    return sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())


@pytest.mark.parametrize(
    ("params", "support"),
    [
        (SamplingParams(temperature=1.0), {0, 1, 2, 3, 4, 5, 6}),
        (SamplingParams(temperature=0.5), {0, 1, 2, 3, 4, 5, 6}),
        (SamplingParams(temperature=2.5), {0, 1, 2, 3, 4, 5, 6}),
        (SamplingParams(temperature=1.0, top_k=3), {1, 5, 3}),
        (SamplingParams(temperature=1.0, top_p=0.8), {1, 5, 3, 4}),
        # 0.3^2 = 0.09 of a sum of 0.2118 is not yet 0.6; 0.09 + 0.0625 is.
        (SamplingParams(temperature=0.5, top_p=0.6), {1, 5}),
        (SamplingParams(temperature=1.0, min_p=0.3), {1, 5, 3, 4}),
        (SamplingParams(temperature=2.0, min_p=0.45), {1, 5, 3, 4, 6}),
        # After top_k the four weigh 0.85: 0.3 + 0.25 is below 0.7 of it, and 0.75 above. Of the whole it needs four.
        (SamplingParams(temperature=1.0, top_k=4, top_p=0.7), {1, 5, 3}),
        (SamplingParams(temperature=1.0, top_k=5, top_p=0.95, min_p=0.5), {1, 5, 3}),
        (SamplingParams(temperature=1.5, top_k=6, top_p=0.9, min_p=0.2), {1, 5, 3, 4, 6}),
    ],
)
def test_draws_follow_the_closed_form(sample_of: Sample, params: SamplingParams, support: set[int]) -> None:
    expected = distribution(PROBABILITIES, params)
    assert set(expected) == support
    draws = FEWER_DRAWS if sample_of is sample_by_rows else DRAWS
    counts = Counter(sample_of(logits_of(PROBABILITIES, draws), rows_of(params, draws, seed=7)).tolist())
    assert set(counts) == support
    assert chi_square(counts, expected) < CHI_SQUARE_0_001[len(support) - 1]


def test_draws_of_many_seeds_at_one_position_follow_the_distribution(sample_of: Sample) -> None:
    params = SamplingParams(temperature=1.0)
    draws = FEWER_DRAWS if sample_of is sample_by_rows else DRAWS
    rows = SamplingRows.of([params] * draws, range(draws), [3] * draws)
    counts = Counter(sample_of(logits_of(PROBABILITIES, draws), rows).tolist())
    assert chi_square(counts, dict(enumerate(PROBABILITIES))) < CHI_SQUARE_0_001[6]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=7),
        SamplingParams(temperature=1.0, top_k=2**31 - 1),
        SamplingParams(temperature=1.0, top_p=1.0, min_p=0.0),
    ],
)
def test_neutral_filters_change_nothing(sample_of: Sample, params: SamplingParams) -> None:
    plain = sample_of(logits_of(PROBABILITIES, 5000), rows_of(SamplingParams(temperature=1.0), 5000))
    assert torch.equal(sample_of(logits_of(PROBABILITIES, 5000), rows_of(params, 5000)), plain)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, top_k=2, top_p=0.5, min_p=0.1),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=5e-324),
    ],
)
def test_greedy_and_what_amounts_to_it(sample_of: Sample, params: SamplingParams) -> None:
    logits = torch.tensor([[-1.0, 3.0, 2.0], [0.5, 0.25, 0.0], [-3.0, -2.0, -1.0]])
    assert sample_of(logits, rows_of(params, 3)).tolist() == [1, 0, 2]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=1)])
def test_the_lowest_id_wins_a_tie(sample_of: Sample, params: SamplingParams) -> None:
    logits = torch.zeros(3, 3000)
    logits[1, [700, 2999, 1234]] = 2.0
    logits[2, :5] = torch.tensor([-1.0, -0.0, 0.0, -0.0, -1.0])
    logits[2, 5:] = -math.inf
    assert sample_of(logits, rows_of(params, 3)).tolist() == [0, 700, 1]


def test_equally_likely_tokens_stay_by_lower_id(sample_of: Sample) -> None:
    params = [SamplingParams(temperature=1.0, top_k=3)] * 500 + [SamplingParams(temperature=1.0, top_p=0.5)] * 500
    drawn = sample_of(torch.zeros(1000, 8), SamplingRows.of(params, [1] * 1000, range(1000)))
    assert set(drawn[:500].tolist()) == {0, 1, 2}
    assert set(drawn[500:].tolist()) == {0, 1, 2, 3}


def test_a_nucleus_of_thousands_of_tokens_is_found_whole(sample_of: Sample) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5)
    logits = torch.zeros(800, 4096)
    logits[::2, 9] = 20.0
    drawn = sample_of(logits, rows_of(params, 800))
    assert set(drawn[::2].tolist()) == {9}
    # 400 draws from 2048 tokens: the largest is among the last 60, or else by a chance of 0.97^400.
    assert int(drawn[1::2].max()) in range(2048 - 60, 2048)
    assert len(set(drawn[1::2].tolist())) > 340


def test_impossible_tokens_are_never_drawn(sample_of: Sample) -> None:
    logits = torch.full((2000, 5), -math.inf)
    logits[:, [1, 4]] = 0.0
    params = SamplingParams(temperature=100.0, top_k=4, top_p=0.999)
    assert set(sample_of(logits, rows_of(params, 2000)).tolist()) == {1, 4}


def test_the_ends_of_the_unit_interval_are_possible_tokens(sample_of: Sample) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -1.0, 0.5, -math.inf]]).expand(2, -1)
    plain = np.zeros(2)
    rows = SamplingRows(plain + 1, plain.astype(np.int64), plain + 1, plain, np.array([0.0, 1 - 2.0**-53]), plain > 0)
    assert sample_of(logits, rows).tolist() == [1, 3]


def test_sampling_leaves_the_logits_as_they_were(sample_of: Sample) -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample_of(logits, rows_of(SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1), 3))
    assert torch.equal(logits, before)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 2000, 10**9]),
    top_p=st.sampled_from([1.0, 0.1, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)


@given(
    st.lists(st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**20)), min_size=2, max_size=9),
    st.sampled_from([7, 1500]),
    st.randoms(use_true_random=False),
)
def test_a_row_draws_the_same_token_alone_and_in_any_batch(
    sample_of: Sample, rows: list[tuple[SamplingParams, int, int]], vocabulary: int, shuffler: random.Random
) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    logits = torch.randn(len(rows), vocabulary, generator=generator).mul(3)
    params, seeds, positions = zip(*rows, strict=True)
    together = sample_of(logits, SamplingRows.of(params, seeds, positions))
    alone = [sample_of(logits[[i]], SamplingRows.of([p], [s], [n])).item() for i, (p, s, n) in enumerate(rows)]
    assert together.tolist() == alone
    order = shuffler.sample(range(len(rows)), len(rows))
    shuffled = SamplingRows.of([params[i] for i in order], [seeds[i] for i in order], [positions[i] for i in order])
    assert sample_of(logits[order], shuffled).tolist() == [alone[i] for i in order]


@given(PARAMS.filter(lambda params: params.temperature > 0), st.integers(0, 2**32))
def test_a_draw_is_one_that_the_filters_leave(sample_of: Sample, params: SamplingParams, seed: int) -> None:
    probabilities = [2.0**-i for i in range(1, 30)]
    drawn = sample_of(logits_of(probabilities, 50), rows_of(params, 50, seed))
    # Kept a hair wider than asked, for what float32 logits lose.
    wider = SamplingParams(params.temperature, params.top_k, min(1.0, params.top_p + 1e-5), params.min_p * 0.9999)
    assert set(drawn.tolist()) <= set(distribution(probabilities, wider))


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocabulary", [1, 40, 3000, 50_000])
def test_all_ways_draw_the_same_tokens(vocabulary: int, spread: float) -> None:
    rng = random.Random(vocabulary)
    logits = torch.randn(40, vocabulary, generator=torch.Generator().manual_seed(0)).mul(spread)
    params = [
        SamplingParams(
            rng.choice([0.0, 0.3, 1.0, 2.0, 5e-324]),
            rng.choice([0, 1, 50, 2000, 2900]),
            rng.choice([1.0, 0.5, 0.95, 1e-9]),
            min_p,
        )
        for min_p in [0.0, 0.02] * 20
    ]
    rows = SamplingRows.of(params, range(40), range(40))
    drawn = sample_by_rows(logits, rows)
    assert sample_at_once(logits, rows).tolist() == drawn.tolist()
    counts = [0, 3, 100, 7] * 10
    positions = logprobs_by_rows(logits, drawn, counts)
    assert logprobs_at_once(logits, drawn, counts) == positions
    for instruction_set in INSTRUCTION_SETS:
        for threads in (1, 2):
            with using(instruction_set, threads):
                assert sample_by_kernels(logits, rows).tolist() == drawn.tolist()
                assert logprobs_by_kernels(logits, drawn, counts) == positions


def test_where_nothing_may_be_drawn_there_is_no_token(sample_of: Sample) -> None:
    logits = torch.full((3, 700), -math.inf)
    logits[1, 699] = -3.0
    for params in (SamplingParams(), SamplingParams(1.0), SamplingParams(0.7, top_k=5, top_p=0.9, min_p=0.1)):
        assert sample_of(logits, rows_of(params, 3)).tolist() == [-1, 699, -1]


def test_several_draws_from_one_row() -> None:
    logits = torch.randn(3, 900, generator=torch.Generator().manual_seed(5))
    rows = rows_of(SamplingParams(1.0), 4)
    source = [2, 0, 2, 2]
    tokens = sample(logits, rows, source=source)
    assert tokens.tolist() == sample(logits[source], rows).tolist()
    assert len(set(tokens.tolist())) > 2
    assert logprobs(logits, tokens, [2, None, 0, 1], source) == logprobs(logits[source], tokens, [2, None, 0, 1])


@WITH_KERNELS
def test_the_kernels_refuse_rows_and_tokens_that_there_are_not() -> None:
    logits = torch.zeros(2, 5)
    with pytest.raises(native.NativeError, match="2 of 2 rows"):
        kernels.draw(logits, rows_of(SamplingParams(), 3), None, [0, 1])
    with pytest.raises(native.NativeError, match="of 2 rows"):
        kernels.draw(logits, rows_of(SamplingParams(), 1), None, [2])
    with pytest.raises(native.NativeError, match="not in the vocabulary"):
        kernels.logprobs(logits, torch.tensor([0]), torch.tensor([5]), [0])
    with pytest.raises(native.NativeError, match="524289 tokens"):
        kernels.draw(torch.zeros(1, 2**19 + 1), rows_of(SamplingParams(1.0), 1), None, None)


def test_every_draw_depends_on_seed_and_position(sample_of: Sample) -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.zeros(300, 2**14)
    by_position = sample_of(logits, SamplingRows.of([params] * 300, [5] * 300, range(300))).tolist()
    by_seed = sample_of(logits, SamplingRows.of([params] * 300, range(300), [5] * 300)).tolist()
    # 300 draws from 16384 collide about 300^2 / 2 / 16384 = 2.7 times.
    assert len(set(by_position)) > 285
    assert len(set(by_seed)) > 285
    assert by_position[5] == by_seed[5]


def test_an_empty_batch(sample_of: Sample, logprobs_of: Logprobs) -> None:
    assert sample_of(torch.empty(0, 10), SamplingRows.of([], [], [])).tolist() == []
    assert logprobs_of(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), []) == []


def close(logprob: float) -> object:
    return pytest.approx(logprob, abs=1e-6)


def test_logprobs_by_hand(logprobs_of: Logprobs) -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0], [0.1, 0.2, 0.3, 0.4]]).log() + 5.0
    first, second = logprobs_of(logits, torch.tensor([1, 3]), [3, 0])
    assert (first.token_id, first.logprob) == (1, close(math.log(2 / 8)))
    # Tokens 0 and 3 are equally likely: the lower id comes first.
    assert [token for token, _ in first.top] == [2, 1, 0]
    assert [value for _, value in first.top] == [close(math.log(1 / 2)), close(math.log(1 / 4)), close(math.log(1 / 8))]
    assert second == PositionLogprobs(3, close(math.log(0.4)), ())  # type: ignore[arg-type]


def test_logprobs_only_for_rows_that_asked() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 2.0], [5.0, 5.0]])
    answers = logprobs(logits, torch.tensor([0, 1, 0]), [None, 9, None])
    assert answers[0] is None
    assert answers[2] is None
    assert answers[1] is not None
    assert answers[1].token_id == 1
    assert answers[1].top == ((0, close(-math.log(2))), (1, close(-math.log(2))))
    assert logprobs(logits, torch.tensor([0, 1, 0]), [None, None, None]) == [None, None, None]


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40), st.data())
def test_logprobs_agree_with_math_log(logprobs_of: Logprobs, values: list[float], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(values) - 1))
    count = data.draw(st.integers(0, 50))
    norm = math.log(math.fsum(map(math.exp, values)))
    [answer] = logprobs_of(torch.tensor([values]), torch.tensor([chosen]), [count])
    assert answer.logprob == close(values[chosen] - norm)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert [token for token, _ in answer.top] == order
    assert [value for _, value in answer.top] == [close(values[i] - norm) for i in order]
