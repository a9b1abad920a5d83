"""The measurement of the books runs whole in small sizes, with Octavo alone where vLLM cannot be had."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bench.books import CASES, LINES, main, on_one_core, summarise
from bench.rounds import BLOCK_SIZE, LocalSide, Sizes, prompt

app = typer.Typer()
app.command()(main)
SMALL = ["--divide", "100", "--rounds", "2"]
SMALLEST = ["--divide", "1000", "--rounds", "1"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def alone() -> dict:
    return json.loads(invoke("--json"))


def test_every_line_is_measured(alone: dict) -> None:
    assert len(alone["lines"]) == len(LINES)
    assert all(line["octavo"] > 0 for line in alone["lines"])
    assert set(alone["large_to_small"]) == {"evict", "evict prompt", "fork"}


def test_without_vllm_nothing_is_compared(alone: dict) -> None:
    assert alone["vllm"] is None
    assert alone["vllm_skipped"] == "no --vllm-venv was given"
    assert not any("vllm" in line for line in alone["lines"])


def test_the_table_says_that_vllm_was_skipped(tmp_path: Path) -> None:
    output = " ".join(invoke(*SMALLEST, "--vllm-venv", str(tmp_path)).split())
    assert "vLLM was skipped: there is no" in output
    assert "make bench-peers" in output


def test_an_environment_without_vllm_is_skipped_with_its_name() -> None:
    reason = json.loads(invoke(*SMALLEST, "--json", "--vllm-venv", sys.prefix))["vllm_skipped"]
    assert f"does not start under {Path(sys.prefix) / 'bin' / 'python'}" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep no process on a core")
def test_both_sides_are_measured_on_the_same_core() -> None:
    before = os.sched_getaffinity(0)
    with on_one_core():
        core = os.sched_getaffinity(0)
        started = subprocess.run(
            [sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"], capture_output=True, text=True
        )
    assert len(core) == 1
    assert {int(number) for number in started.stdout.split()} == core
    assert os.sched_getaffinity(0) == before


def test_a_phase_in_which_all_is_slow_changes_no_ratio() -> None:
    phases = [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 2.0]
    ours = {line.key: phases for line in LINES}
    # A line that only one of the two measured in a slow phase would look half or twice as fast.
    samples = {"octavo": ours, "vllm": {"take": [3.0, 3.0, 6.0, 3.0, 6.0, 6.0, 3.0]}}
    lines = summarise(samples, Sizes(), "4 times")["lines"]
    [compared] = [line for line in lines if "vllm" in line]
    assert (compared["octavo"], compared["vllm"], compared["vllm_ratio"]) == (2.0, 3.0, 3.0)
    assert compared["goal"] == "4 times"


def test_the_garbage_collector_is_left_on(alone: dict) -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_case_is_set_up_once_and_goes_on() -> None:
    side = LocalSide(CASES, Sizes().divided(100))
    first, second = side.round("decode"), side.round("decode")
    side.close()
    assert set(first) == set(second) == {"decode"}


def test_other_prompts_share_no_block() -> None:
    first, second = prompt(1, 1_000), prompt(2, 1_000)
    starts = range(0, 1_000, BLOCK_SIZE)
    assert all(first[start : start + BLOCK_SIZE] != second[start : start + BLOCK_SIZE] for start in starts)
    assert first == prompt(1, 1_000)
