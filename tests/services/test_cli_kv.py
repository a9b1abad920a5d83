"""The commands of the KV manager as processes: output, exit codes, and one line for what cannot be done."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb

from services.kv_process import RunningKvManager
from tests.services.kv_support import (
    WAIT_SECONDS,
    clean_environment,
    command,
    kv_settings,
    kv_stub,
    run_command,
    running_kv_manager,
    scrape,
)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningKvManager]:
    """A KV manager whose pool p has 8 usable blocks of 4 tokens; sequence a holds 2, one of them computed."""
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        spec = pb.PoolSpec(num_blocks=9, block_size=4, model_fingerprint="m")
        stub.OpenPool(pb.OpenPoolRequest(pool_id="p", spec=spec, runner_id="r"))
        stub.Allocate(pb.AllocateRequest(pool_id="p", sequence_id="a", token_ids=range(6)))
        append = pb.SequenceAppend(sequence_id="a", computed_tokens=4)
        stub.Append(pb.AppendRequest(pool_id="p", appends=[append]))
        yield running


def asked(running: RunningKvManager, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command(*arguments, "--kv-address", running.address, "--pool", "p")


def line_of_failure(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a command which could not do its work prints."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_pool_shows_the_occupancy(running: RunningKvManager) -> None:
    done = asked(running, "pool")
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["held", "2", "25.0%"] in rows
    assert ["free", "6", "75.0%"] in rows

    shown = json.loads(asked(running, "pool", "--json").stdout)
    assert shown["spec"]["block_size"] == 4
    assert shown["occupancy"]["held_blocks"] == 2
    assert shown["occupancy"]["cached_blocks"] == 0
    assert shown["totals"]["queried_tokens"] == 6


def test_pool_watches_until_it_is_interrupted(running: RunningKvManager) -> None:
    arguments = ("pool", "--json", "--watch", "--interval", "0.1", "--kv-address", running.address, "--pool", "p")
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True, env=clean_environment())
    assert process.stdout is not None
    seen = [json.loads(process.stdout.readline())["occupancy"]["held_blocks"]]
    with kv_stub(running.address) as stub:
        stub.Free(pb.FreeRequest(pool_id="p", sequences=[pb.SequenceAppend(sequence_id="a")]))
    while seen[-1] == 2:
        seen.append(json.loads(process.stdout.readline())["occupancy"]["held_blocks"])
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_SECONDS) == 130
    assert seen[-1] == 0


def test_sequence_shows_the_block_table(running: RunningKvManager) -> None:
    with kv_stub(running.address) as stub:
        table = stub.GetBlockTable(pb.GetBlockTableRequest(pool_id="p", sequence_id="a"))
    name = table.blocks[0].block_hash.hex()
    done = asked(running, "sequence", "a")
    assert done.returncode == 0
    assert "6 tokens, 4 computed" in done.stdout
    assert name[:16] in done.stdout

    shown = json.loads(asked(running, "sequence", "a", "--json").stdout)
    assert shown["sequence"]["num_tokens"] == 6
    first, second = shown["blocks"]
    assert first == {
        "block_id": table.blocks[0].block_id,
        "reference_count": 1,
        "block_hash": name,
        "stored_tokens": 4,
    }
    assert (second["block_hash"], second["stored_tokens"]) == ("", 0)


def test_check_tells_right_from_wrong_by_its_exit_code(running: RunningKvManager) -> None:
    done = asked(running, "check")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The books are right: 9 blocks and 1 sequences checked." in done.stdout

    spoil(running)
    done = asked(running, "check")
    assert done.returncode == 1
    assert "The books are wrong" in done.stdout
    done = asked(running, "check", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["ok"] is False
    assert report["violations"]


def spoil(running: RunningKvManager) -> None:
    """Makes a table name the null block."""
    running.manager.pool("p").live["a"].blocks[0] = 0


@pytest.mark.parametrize("arguments", [("pool",), ("sequence", "a"), ("check",)])
def test_a_server_that_is_not_there(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    line = line_of_failure(run_command(*arguments, "--kv-address", address))
    assert line == f"octavo: No KV manager answers at {address} (No such file or directory); is it running?\n"


def test_what_the_kv_manager_does_not_know(running: RunningKvManager) -> None:
    assert "no live sequence 'zz'" in line_of_failure(asked(running, "sequence", "zz"))
    missing = run_command("check", OCTAVO_KV_ADDRESS=running.address, OCTAVO_POOL_ID="nowhere")
    assert "no pool 'nowhere' is open" in line_of_failure(missing)


def test_the_kv_manager_serves_and_stops(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/deep/kv.sock"
    arguments = ("kv-manager", "--kv-address", address, "--kv-metrics-address", "127.0.0.1:0", "--log-format", "json")
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True, env=clean_environment())
    assert process.stderr is not None
    said = json.loads(process.stderr.readline())
    assert (said["event"], said["address"], said["service"]) == ("kv-manager serves", address, "kv-manager")
    assert scrape(said["metrics"].removeprefix("http://").removesuffix("/metrics"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_SECONDS) == 0
    assert json.loads(process.stderr.read())["event"] == "kv-manager stops"
    process.stderr.close()
    assert not os.path.exists(f"{tmp_path}/deep/kv.sock")


def test_start_up_errors_are_one_line(running: RunningKvManager, tmp_path: Path) -> None:
    assert "another process serves" in line_of_failure(run_command("kv-manager", "--kv-address", running.address))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = f"127.0.0.1:{listening.getsockname()[1]}"
        assert "the port is in use" in line_of_failure(run_command("kv-manager", "--kv-address", port))
        given = ("--kv-address", f"unix:{tmp_path}/k.sock", "--kv-metrics-address", port)
        assert "Cannot serve metrics" in line_of_failure(run_command("kv-manager", *given))
        assert not (tmp_path / "k.sock").exists()
    assert "'loud' is refused" in line_of_failure(run_command("kv-manager", "--log-level", "loud"))
    assert "no.yaml" in line_of_failure(run_command("kv-manager", OCTAVO_CONFIG=str(tmp_path / "no.yaml")))
    assert "both --tls-cert and --tls-key" in line_of_failure(run_command("kv-manager", "--tls-cert", "c.pem"))


def test_help_says_units_defaults_and_variables() -> None:
    done = run_command("kv-manager", "--help", COLUMNS="200")
    assert done.returncode == 0
    for expected in (
        "Seconds that calls may go on",
        "OCTAVO_GRACE_SECONDS",
        "(10)",
        "--kv-metrics-address",
        "127.0.0.1:9401",
    ):
        assert expected in done.stdout
