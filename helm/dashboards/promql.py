"""Short hand for PromQL: whose series are meant, and over which time."""

from __future__ import annotations

import re

ANY = 'namespace=~"$namespace",job=~"$job",pod=~"$pod",instance=~"$instance"'
"""The series of the pods that the variables of a dashboard choose."""

SELECTORS = {
    "ANY": ANY,
    "KV": ANY + ',pool=~"$pool"',
    "TENANT": ANY + ',tenant=~"$tenant"',
}

_SELECTOR = re.compile(r"\{(ANY|KV|TENANT)(,[^}]*)?\}")
_METRIC = re.compile(r"\b(?:octavo|process|python)_[a-z0-9_]+\b|\bup\b(?=\{)")


def expand(expression: str) -> str:
    """Writes out {ANY}, {KV} and {TENANT}, with further matchers behind a comma, and [RATE]."""
    expression = _SELECTOR.sub(lambda found: "{" + SELECTORS[found[1]] + (found[2] or "") + "}", expression)
    return expression.replace("[RATE]", "[$__rate_interval]")


def metrics_of(expression: str) -> list[str]:
    """The metrics that an expression names, in the order in which they come."""
    return list(dict.fromkeys(_METRIC.findall(expression)))


def quantile(share: float, metric: str, selector: str = "ANY", by: str = "") -> str:
    """A quantile of a histogram's rate, by some labels; nothing, rather than NaN, where nothing was observed."""
    labels = ", ".join(["le", by]) if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[RATE]))) >= 0"


def mean(metric: str, selector: str = "ANY", by: str = "") -> str:
    """The mean of a histogram's observations, by some labels; nothing where nothing was observed."""
    return ratio(f"{metric}_sum", f"{metric}_count", selector, by)


def ratio(part: str, whole: str, selector: str = "ANY", by: str = "") -> str:
    """The share of two counters' rates, by some labels; nothing where the whole did not grow."""
    grouped = f"sum by ({by}) " if by else "sum "
    over = f"{grouped}(rate({whole}{{{selector}}}[RATE]))"
    return f"{grouped}(rate({part}{{{selector}}}[RATE])) / ({over} > 0)"


def per_second(metric: str, selector: str = "ANY", by: str = "") -> str:
    """A counter's growth per second, by some labels."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{{selector}}}[RATE]))"
