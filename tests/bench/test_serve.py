"""Octavo alone through the whole bench: real services, a part of two workloads, and a peer that is not there."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import typer
from octavo.runner.v1 import model_runner_pb2 as runner_pb
from typer.testing import CliRunner

from bench.serve.__main__ import serve
from bench.serve.cpu import CpuMeter
from bench.serve.driven import DrivenSystem, DriverFailed
from bench.serve.octavo_system import Sample, tokens_with_slots, useful_shares
from bench.serve.player import play
from bench.serve.systems import SYSTEMS
from bench.serve.workloads import Conversation, Turn, Workload, build
from services.config import UpSettings

app = typer.Typer()
app.command()(serve)


def descendants(process_id: int) -> list[int]:
    """The processes that came from this one."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *descendants(child))]


def test_octavo_alone_and_a_second_call_that_runs_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "serve.json"
    arguments = ["--systems", "octavo,hf", "--workloads", "C,E", "--limit", "1", "--patience", "0", "--json", str(kept)]
    first = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "none.png")])
    assert first.exit_code == 0, first.output
    assert "skipped: hf: no --peers; make serve-peers PEERS=DIR ONLY=hf installs it" in first.stderr
    runs = json.loads(kept.read_text())["runs"]
    assert [(run["system"], run["workload"], run["answers"]) for run in runs] == [
        ("octavo", "C", 1),
        ("octavo", "E", 4),
    ]
    for run in runs:
        assert 0 < run["extra"]["overhead_share"] < 1
        assert 0 < run["extra"]["useful_share"] <= 1
        assert run["own_cores"] > 0

    second = CliRunner().invoke(app, arguments)
    assert second.exit_code == 0, second.output
    assert json.loads(kept.read_text())["runs"] == runs
    assert "octavo, round" not in second.stderr


def test_a_system_that_is_stopped_in_a_run_leaves_nothing(tmp_path: Path) -> None:
    workload = build("C")
    system = DrivenSystem(SYSTEMS["octavo"], workload, None, tmp_path / "log")
    services = descendants(system.process_id)
    assert len(services) == 3  # octavo up and the two services.

    def stop_when_busy() -> None:
        while not system.is_busy:
            time.sleep(0.01)
        system.stop()

    stopper = threading.Thread(target=stop_when_busy)
    stopper.start()
    with pytest.raises(DriverFailed):
        system.run(workload)
    stopper.join()
    assert not [each for each in services if Path(f"/proc/{each}").exists()]


def test_an_unknown_system_is_refused() -> None:
    refused = CliRunner().invoke(app, ["--systems", "octavo,nobody"])
    assert refused.exit_code == 2
    assert "there is no nobody" in refused.output


def test_the_player_carries_the_history_and_waits_for_arrivals() -> None:
    asked: list[list[int]] = []

    async def stream(prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Sequence[int]]:
        asked.append(list(prompt))
        yield [100]
        await asyncio.sleep(0)
        yield [101] * (max_tokens - 1)

    late = Conversation((Turn((9,), 1),), arrival=0.05)
    chat = Conversation((Turn((1, 2), 3), Turn((3,), 2)))
    answers = asyncio.run(play(Workload("E", (late, chat)), stream))
    assert asked == [[1, 2], [1, 2, 100, 101, 101, 3], [9]]
    assert [answer.token_ids for answer in answers] == [(100,), (100, 101, 101), (100, 101)]
    assert answers[0].asked >= 0.05
    assert answers[1].times[0] <= answers[1].times[1] == answers[1].times[2] <= answers[2].asked


def test_an_answer_that_ends_early_is_an_error() -> None:
    async def stream(prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Sequence[int]]:
        yield [100]

    with pytest.raises(ValueError, match="1 tokens, not 2"):
        asyncio.run(play(Workload("C", (Conversation((Turn((1,), 2),)),)), stream))


def test_useful_shares_weigh_moments_by_what_is_reserved() -> None:
    samples = [Sample(reserved=160, stored=80, known=134, spare=16), Sample(40, 40, 40, 0), Sample(0, 0, 0, 0)]
    assert useful_shares(samples) == {"useful_share": 174 / 200, "spare_share": 16 / 200, "stored_share": 120 / 200}
    assert useful_shares([Sample(0, 0, 0, 0)]) == {}


def test_a_token_counts_when_its_sequence_has_a_slot_for_it() -> None:
    request = runner_pb.RequestInfo(prompt_tokens=30, output_tokens=3, sequence_ids=["r/0"])
    assert [tokens_with_slots(request, {"r/0": room}) for room in (32, 48)] == [32, 33]
    assert tokens_with_slots(request, {}) == 0, "the KV manager does not know it any more"
    assert tokens_with_slots(runner_pb.RequestInfo(prompt_tokens=30), {"r/0": 32}) == 0, "it waits"


def test_what_octavo_is_started_with_are_settings() -> None:
    kinds = {}
    for name, spec in SYSTEMS.items():
        if spec.module == "octavo_system":
            given = dict(argument.removeprefix("--").split("=") for argument in spec.options["arguments"])
            settings = UpSettings(**{setting.replace("-", "_"): value for setting, value in given.items()})
            kinds[name] = settings.weights_dtype, settings.activations_dtype, settings.kv_dtype
    assert kinds["octavo"] == ("auto", "auto", "auto")
    assert kinds["octavo-w4a8-kv16"] == ("auto", "int8", "bfloat16")
    assert kinds["octavo-w8a8-kv16"] == ("int8_channel", "int8", "bfloat16")


def test_own_cpu_time_is_not_foreign() -> None:
    with CpuMeter() as meter:
        sum(range(3_000_000))
    assert meter.use.own_cores > 0
    assert meter.use.seconds > 0
    assert meter.use.foreign_cores >= 0
