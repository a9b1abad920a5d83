"""The in-process bench counts tokens and times right, on a workload that is small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import workloads


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A file with one workload."""
    file = tmp_path / "workloads.json"
    file.write_text(json.dumps({"tiny": {"prompts": [[5, 6, 7], [8, 9], [10]], "max_tokens": 4}}))
    return file


def test_a_side_gives_its_figures_by_workload(tiny: Path) -> None:
    figures = workloads.run_all(tiny, ["tiny"], limit=0)["tiny"]
    # 12 tokens at this rate take longer than any one of the times that make it up.
    seconds = 12 / figures["output tokens/s"]
    assert 0 < figures["TTFT ms"] < 1e3 * seconds
    assert 0 < figures["ms between tokens"] < 1e3 * seconds


def test_both_sides_are_compared(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["workloads", str(tiny), "--names", "tiny", "--rounds", "1", "--limit", "2"])
    workloads.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "tiny output tokens/s",
        "tiny TTFT ms",
        "tiny ms between tokens",
    ]
    for line in lines:
        kernels, torch, ratio = (float(word) for word in line.replace(";", " ").replace(",", " ").split() if _is(word))
        assert ratio == pytest.approx(kernels / torch, rel=0.1, abs=0.05)


def _is(word: str) -> bool:
    return word.replace(".", "", 1).isdigit()
