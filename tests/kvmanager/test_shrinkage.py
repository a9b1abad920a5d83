"""How far numbers of a group are believed: little where groups differ by chance alone, much where they differ."""

import random
from math import exp, lgamma, log

import pytest

from kvmanager.shrinkage import TRUSTS, likeliest_trust


def drawn(trust: float | None, groups: int, expected: float) -> list[tuple[float, float]]:
    """Groups of (seen, expected): Poisson counts, whose ratios are gamma of that shape, or 1 where it is None."""
    rng = random.Random(7)

    def poisson(mean: float) -> int:
        product, count = rng.random(), 0
        while product > exp(-mean):
            product *= rng.random()
            count += 1
        return count

    ratios = [rng.gammavariate(trust, 1 / trust) if trust else 1.0 for _ in range(groups)]
    return [(poisson(expected * ratio), expected) for ratio in ratios]


@pytest.mark.parametrize("trust", [1.0, 4.0, 16.0, 64.0])
def test_the_spread_of_the_groups_is_found(trust: float) -> None:
    assert likeliest_trust(drawn(trust, groups=800, expected=100.0)) == trust


def test_where_groups_differ_by_chance_alone_nothing_is_read_into_them() -> None:
    assert likeliest_trust(drawn(None, groups=800, expected=100.0)) == TRUSTS[-1]


def test_the_likelihood_is_that_of_the_negative_binomial() -> None:
    groups = [(3.0, 1.5), (0.0, 2.0), (7.0, 2.5), (1.0, 0.25)]

    def likelihood(trust: float) -> float:
        total = 0.0
        for seen, expected in groups:
            chance = trust / (trust + expected)
            ways = lgamma(trust + seen) - lgamma(trust) - lgamma(seen + 1)
            total += ways + trust * log(chance) + seen * log(1 - chance)
        return total

    assert likeliest_trust(groups) == max(TRUSTS, key=likelihood)
    assert likeliest_trust([(1.0, 1.0)]) == max(TRUSTS, key=lambda trust: -(trust + 1) * log(1 + 1 / trust))


def test_without_a_group_the_least_is_said() -> None:
    assert likeliest_trust([]) == TRUSTS[0]
