"""How far numbers of a group are to be believed, learned from how much the groups differ: empirical Bayes for rates.

Of each group so many uses were seen and so many expected. If seen are Poisson of expected times a ratio, and ratios are
drawn from a gamma distribution of mean 1 and shape `trust`, then seen are negative binomial (Greenwood and Yule, 1920),
and the likeliest trust follows. Groups that differ by chance alone get a large one, so nothing is read into them.
"""

from __future__ import annotations

from math import lgamma, log

TRUSTS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)


def likeliest_trust(groups: list[tuple[float, float]]) -> float:
    """The one of TRUSTS under which `groups` of (seen, expected), expected above 0, are likeliest; the least of equals.

    Both count independent uses.
    """
    best, found = float("-inf"), TRUSTS[0]
    for trust in TRUSTS:
        likelihood = len(groups) * (trust * log(trust) - lgamma(trust))
        likelihood += sum([lgamma(trust + seen) - (trust + seen) * log(trust + expected) for seen, expected in groups])
        if likelihood > best:
            best, found = likelihood, trust
    return found
