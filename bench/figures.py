"""What a benchmark has found, on standard output: one JSON object, or a line for each figure."""

from __future__ import annotations

import json
from collections.abc import Mapping

import typer


def show(figures: Mapping[str, float], as_json: bool, digits: int = 4) -> None:
    """digits: behind the point, in the lines."""
    if as_json:
        typer.echo(json.dumps(dict(figures)))
        return
    for name, value in figures.items():
        typer.echo(f"{name:40} {value:12.{digits}f}")
