"""The results as a table for people: one line for each figure that somebody asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.gpu.plan import Results

Row = tuple[str, str, str]
"""What, of what, how much."""
_REASONS = ("failed", "cut_short", "skipped")
"""Why figures are missing."""


def table(results: Results) -> str:
    """Three columns; parts in the order in which they were run."""
    rows = list(_rows(results))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows)


def _rows(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Row]:
    speeds = results.get("speeds", {}).get("", {})
    for part, backends in results.items():
        for backend, figures in backends.items():
            known = {name: value for name, value in figures.items() if name not in _REASONS}
            if known:
                yield from _of_part(part, backend, known, speeds)
            yield from ((part, backend, str(figures[name])) for name in _REASONS if name in figures)


def _of_part(part: str, backend: str, figures: Mapping[str, Any], speeds: Mapping[str, Any]) -> Iterator[Row]:
    if part in ("correctness", "shapes"):
        yield part, backend, _correct(figures)
    elif part == "attention":
        yield from _attention(backend, figures, speeds)
    elif part == "steps":
        yield from _steps(backend, figures, speeds)
    elif part == "split":
        yield part, backend, f"{figures['ratio']:.3f} of the throughput with the books inside"
    elif part == "huggingface":
        yield part, backend, _beside(figures)
    else:
        yield from ((part, name, _number(value)) for name, value in figures.items())


def _correct(figures: Mapping[str, Any]) -> str:
    told = f"{figures['right']} shapes right, {len(figures['refused'])} refused, {len(figures['wrong'])} wrong"
    return told + "".join(f"; {name}: {reason}" for name, reason in figures["wrong"].items())


def _attention(backend: str, figures: Mapping[str, Any], speeds: Mapping[str, Any]) -> Iterator[Row]:
    for batch, one in figures["decode"].items():
        told = f"{one['us']:.1f} us, {one['gb_s']:.1f} GB/s{_share(one['gb_s'], speeds.get('copy_gb_s'), 'a copy')}"
        paging = f"{one['overhead_of_paging']:+.1%} over contiguous K/V, {one['overhead_of_order']:+.1%} over order"
        yield "decode attention", f"{backend}, batch {batch}", f"{told}; {paging}"
    if (one := figures.get("prefill")) is None:
        return
    told = f"{one['tflop_s']:.2f} TFLOP/s{_share(one['tflop_s'], speeds.get('matmul_tflop_s'), 'a matmul')}"
    yield "prefill attention", f"{backend}, {one['tokens']} tokens", told


def _steps(backend: str, figures: Mapping[str, Any], speeds: Mapping[str, Any]) -> Iterator[Row]:
    for batch, one in figures.items():
        where = f"{backend}, batch {batch}"
        if "skipped" in one:
            yield "step", where, one["skipped"]
            continue
        told = f"{one['ms']:.3f} ms, {one['tokens_s']:.1f} tokens/s"
        yield "step", where, told + _share(one["gb_s"], speeds.get("copy_gb_s"), "a copy's bytes")
        graphs = f"{one['ms_graphs']:.3f} ms, {one['tokens_s_graphs']:.1f} tokens/s" if "ms_graphs" in one else ""
        yield "step with graphs", where, graphs or one["graphs"]


def _beside(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['octavo_tokens_s']:.1f} tokens/s, generate() {figures['generate_tokens_s']:.1f} in batches of "
        f"{figures['generate_batch']}: {figures['times']:.2f} times"
    )


def _share(value: float, whole: float | None, of: str) -> str:
    return f" ({value / whole:.0%} of {of})" if whole else ""


def _number(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
