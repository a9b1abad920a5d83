"""Bars of how many times as fast Octavo is as its peers, like beside like, one group for each workload."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from bench.serve.figures import Results
from bench.serve.report import pairs_of, ratio

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")


def speedups(results: Results) -> dict[str, dict[str, float]]:
    """By pair ("ours / peer") and workload: Octavo's output rate over the peer's, first token included."""
    workloads = sorted({each.workload for each in results.runs})
    found = {
        pair: {name: ratio(results, *pair, name, "output_rate") for name in workloads} for pair in pairs_of(results)
    }
    return {
        " / ".join(pair): {name: each for name, each in row.items() if each is not None} for pair, row in found.items()
    }


def plot(results: Results, path: Path) -> None:
    """Writes a PNG or SVG. Does nothing where no peer shares a round with Octavo."""
    rows = {pair: row for pair, row in speedups(results).items() if row}
    if not rows:
        return
    workloads = sorted({name for row in rows.values() for name in row})
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(rows)
    for index, (pair, row) in enumerate(rows.items()):
        places = [workloads.index(name) + (index - (len(rows) - 1) / 2) * width for name in row]
        bars = axes.bar(places, list(row.values()), width, label=pair, color=COLOURS[index % len(COLOURS)])
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("output tokens/s, Octavo / peer")
    axes.set_title("How many times as fast Octavo is, by workload")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
