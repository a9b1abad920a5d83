"""bench.timeline runs, and its parts are those of whole decode steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.timeline import PHASES, Timeline, draw, measure


def test_two_streams() -> None:
    """Of 12 tokens the first comes with the prompt; the second stream may be admitted a step after the first."""
    timeline = measure(2, 12)
    assert timeline.steps in (10, 11)
    assert timeline.round_trip_ms > 0
    assert timeline.phases_ms["forward"] == max(timeline.phases_ms.values())


def test_the_picture(tmp_path: Path) -> None:
    timeline = Timeline(dict.fromkeys(PHASES, 2.0), round_trip_ms=1.0, waited_steps=0, steps=5)
    assert timeline.step_ms == pytest.approx(10)
    draw(timeline, 2, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
