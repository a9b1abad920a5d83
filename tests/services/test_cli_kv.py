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
from tests.e2e.stack import run_octavo
from tests.services.kv_support import (
    WAIT_SECONDS,
    clean_environment,
    command,
    kv_settings,
    kv_stub,
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
    return run_octavo(*arguments, "--kv-address", running.address, "--pool", "p")


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


def test_pool_shows_how_it_is_kept_and_what_is_pinned_and_removed(running: RunningKvManager) -> None:
    spec = pb.PoolSpec(num_blocks=9, block_size=4, prefix_index=pb.PREFIX_INDEX_RADIX)
    spec.eviction_policy, spec.hash_algorithm = pb.EVICTION_POLICY_LRU, pb.HASH_ALGORITHM_XXH3
    with kv_stub(running.address) as stub:
        stub.OpenPool(pb.OpenPoolRequest(pool_id="kept", spec=spec, runner_id="r"))
        cache(stub, "kept", range(8), pin_seconds=60)
        cache(stub, "kept", range(50, 62))
        stub.RemovePrefix(pb.RemovePrefixRequest(pool_id="kept", token_ids=range(50, 62)))
    arguments = ("pool", "--kv-address", running.address, "--pool", "kept")
    shown = run_octavo(*arguments, COLUMNS="150").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert "index radix, names xxh3, eviction lru" in shown
    assert ["pinned", "2", "25.0%"] in rows
    assert ["blocks", "removed", "with", "their", "prefix", "3"] in rows
    assert ["looked", "up", "by", "the", "last", "2", "prompts", "20"] in rows

    pool = json.loads(run_octavo(*arguments, "--json").stdout)
    kept = [pool["spec"][name] for name in ("prefix_index", "hash_algorithm", "eviction_policy")]
    assert kept == ["radix", "xxh3", "lru"]
    assert (pool["occupancy"]["pinned_blocks"], pool["totals"]["removed_blocks"]) == (2, 3)


def cache(stub: Any, pool: str, tokens: range, salt: str = "", pin_seconds: float = 0.0) -> None:
    """Caches a prompt as a request would that has come and gone."""
    retention, scope = pb.Retention(pin_seconds=pin_seconds), pb.CacheScope(salt=salt)
    stub.Allocate(pb.AllocateRequest(pool_id=pool, sequence_id="c", token_ids=tokens, scope=scope, retention=retention))
    done = pb.SequenceAppend(sequence_id="c", computed_tokens=len(tokens))
    stub.Free(pb.FreeRequest(pool_id=pool, sequences=[done]))


class TestRemovePrefix:
    def test_what_is_cached_is_forgotten(self, running: RunningKvManager) -> None:
        with kv_stub(running.address) as stub:
            cache(stub, "p", range(50, 62))
            cache(stub, "p", range(50, 58), salt="secret")
        # 11 tokens are 2 full blocks, and the third continues them.
        ids = ",".join(map(str, range(50, 61)))
        done = asked(running, "remove-prefix", "--token-ids", ids)
        assert (done.returncode, done.stdout, done.stderr) == (0, "3 blocks forgotten.\n", "")
        assert asked(running, "remove-prefix", "--token-ids", ids).stdout == "0 blocks forgotten.\n"

    @pytest.mark.parametrize("given", [{"OCTAVO_SALT": "secret"}, {"OCTAVO_CACHE_SALT": "secret"}])
    def test_the_salt_comes_from_the_environment(self, running: RunningKvManager, given: dict[str, str]) -> None:
        with kv_stub(running.address) as stub:
            cache(stub, "p", range(50, 58), salt="secret")
        arguments = ("remove-prefix", "--token-ids", "50,51,52,53", "--kv-address", running.address, "--pool", "p")
        assert run_octavo(*arguments).stdout == "0 blocks forgotten.\n"
        assert run_octavo(*arguments, "--json", **given).stdout == '{"removed_blocks": 2, "held_blocks": 0}\n'

    def test_what_is_held_stays_and_the_exit_code_says_so(self, running: RunningKvManager) -> None:
        done = asked(running, "remove-prefix", "--token-ids", "0,1,2,3")
        assert (done.returncode, done.stdout) == (1, "0 blocks forgotten; live sequences hold 1 block.\n")

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ((), "Give either --token-ids or --text."),
            (("--token-ids", "1", "--text", "a"), "Give either --token-ids or --text."),
            (("--token-ids", "1,x"), "'1,x' must be whole numbers"),
            (("--token-ids", "-1"), "cannot be sent"),
            (("--token-ids", "1", "--cache-salt", "s" * 129), "at most 128 bytes, got 129"),
            (("--text", "a", "--runner-address", "unix:/nowhere.sock"), "No model runner answers"),
        ],
    )
    def test_what_cannot_be_done(self, running: RunningKvManager, arguments: tuple[str, ...], sentence: str) -> None:
        assert sentence in line_of_failure(asked(running, "remove-prefix", *arguments))


class TestQuota:
    def test_it_is_shown_and_set(self, running: RunningKvManager) -> None:
        with kv_stub(running.address) as stub:
            cache(stub, "p", range(50, 58), salt="secret")
        done = asked(running, "quota")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "2 blocks without a limit occupied: 2 held, 0 cached.\n"
        assert asked(running, "quota", "secret").stdout == "2 blocks without a limit occupied: 0 held, 2 cached.\n"
        done = asked(running, "quota", "secret", "--max-blocks", "3")
        assert done.stdout == "2 of 3 blocks occupied: 0 held, 2 cached.\n"
        again = run_octavo("quota", "--json", "--kv-address", running.address, "--pool", "p", OCTAVO_SALT="secret")
        assert json.loads(again.stdout) == {"quota_blocks": 3, "held_blocks": 0, "cached_blocks": 2}
        assert "without a limit" in asked(running, "quota", "secret", "--max-blocks", "0").stdout

    def test_every_salt(self, running: RunningKvManager) -> None:
        done = asked(running, "quota", "--every-salt", "--max-blocks", "5")
        assert done.stdout == "Each salt without a quota of its own may occupy at most 5 blocks.\n"
        assert asked(running, "quota", "new").stdout == "0 of 5 blocks occupied: 0 held, 0 cached.\n"
        assert "without a limit" in asked(running, "quota").stdout
        done = asked(running, "quota", "--every-salt", "--max-blocks", "0", "--json")
        assert json.loads(done.stdout) == {"quota_blocks": 0}

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("--every-salt",), "--every-salt needs --max-blocks."),
            (("s", "--every-salt", "--max-blocks", "1"), "either a salt (also by OCTAVO_SALT) or --every-salt"),
            (("s", "--max-blocks", "9"), "0 (no limit) to 8 blocks"),
        ],
    )
    def test_what_cannot_be_done(self, running: RunningKvManager, arguments: tuple[str, ...], sentence: str) -> None:
        assert sentence in line_of_failure(asked(running, "quota", *arguments))

    def test_no_sentence_tells_a_salt(self, running: RunningKvManager) -> None:
        for more in ((), ("--max-blocks", "9"), ("--max-blocks", "1"), ("--json",)):
            done = asked(running, "quota", "pssst", *more)
            assert "pssst" not in done.stdout + done.stderr


class TestEvents:
    def lines(self, done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def test_a_snapshot_and_then_what_happened_since(self, running: RunningKvManager) -> None:
        with kv_stub(running.address) as stub:
            cache(stub, "p", range(50, 62))
            table = stub.GetBlockTable(pb.GetBlockTableRequest(pool_id="p", sequence_id="a"))
            snapshot = self.lines(asked(running, "events", "--no-follow", "--json"))
            assert {line["kind"] for line in snapshot} == {"snapshot"}
            assert [line["first"] for line in snapshot] == [True, False]
            assert [line["last"] for line in snapshot] == [False, True]
            assert sorted(len(line["block_hashes"]) for line in snapshot) == [1, 3]
            (own,) = [line for line in snapshot if len(line["block_hashes"]) == 1]
            assert (own["block_hashes"], own["parent_hash"]) == ([table.blocks[0].block_hash.hex()], "")

            number, boot = snapshot[0]["number"], snapshot[0]["boot_id"]
            since = ("events", "--no-follow", "--json", "--from", str(number + 1))
            assert self.lines(asked(running, *since)) == []
            stub.RemovePrefix(pb.RemovePrefixRequest(pool_id="p", token_ids=range(50, 62)))
            removed = self.lines(asked(running, *since))
            assert {line["kind"] for line in removed} == {"removed"}
            assert [line["number"] for line in removed] == list(range(number + 1, number + 1 + len(removed)))
            (chain,) = [line["block_hashes"] for line in snapshot if len(line["block_hashes"]) == 3]
            assert [each for line in removed for each in line["block_hashes"]] == chain[::-1]
            assert self.lines(asked(running, *since, "--boot-id", boot)) == removed
            assert {line["kind"] for line in self.lines(asked(running, *since, "--boot-id", "other"))} == {"snapshot"}

    def test_lines_for_people(self, running: RunningKvManager) -> None:
        with kv_stub(running.address) as stub:
            cache(stub, "p", range(50, 58))
            cache(stub, "p", range(50, 62))
            stub.Free(pb.FreeRequest(pool_id="p", sequences=[pb.SequenceAppend(sequence_id="a")]))
            stub.ResetCache(pb.ResetCacheRequest(pool_id="p"))
        (first,) = asked(running, "events", "--no-follow").stdout.splitlines()
        number = int(first.split()[0])
        assert first == f"{number}  snapshot 0 blocks"
        lines = asked(running, "events", "--no-follow", "--from", "1").stdout.splitlines()
        assert [line.split()[0] for line in lines] == [str(each) for each in range(1, number + 1)]
        first, second, third, *_, last = lines
        names = second.split(": ")[1].split()
        assert first.startswith("1  stored 1 block: ")
        assert second.startswith("2  stored 2 blocks: ")
        assert [len(name) for name in names] == [16, 16]
        assert third.startswith(f"3  stored 1 block behind {names[1]}: ")
        assert last == f"{number}  cleared"

    def test_it_follows_until_it_is_interrupted(self, running: RunningKvManager) -> None:
        arguments = ("events", "--json", "--kv-address", running.address, "--pool", "p")
        process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, text=True, env=clean_environment())
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["kind"] == "snapshot"
        with kv_stub(running.address) as stub:
            cache(stub, "p", range(50, 58))
        stored = json.loads(process.stdout.readline())
        assert (stored["kind"], len(stored["block_hashes"])) == ("stored", 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 130
        process.stdout.close()

    def test_a_pool_that_is_not_there(self, running: RunningKvManager) -> None:
        for follow in ("--follow", "--no-follow"):
            missing = run_octavo("events", follow, "--kv-address", running.address, "--pool", "nowhere")
            assert "no pool 'nowhere' is open" in line_of_failure(missing)


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


@pytest.mark.parametrize(
    "arguments",
    [
        ("pool",),
        ("sequence", "a"),
        ("check",),
        ("remove-prefix", "--token-ids", "1"),
        ("quota",),
        ("events",),
        ("events", "--no-follow"),
    ],
)
def test_a_server_that_is_not_there(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    address = f"unix:{tmp_path}/nobody.sock"
    line = line_of_failure(run_octavo(*arguments, "--kv-address", address))
    assert line == f"octavo: No KV manager answers at {address} (No such file or directory); is it running?\n"


def test_what_the_kv_manager_does_not_know(running: RunningKvManager) -> None:
    assert "no live sequence 'zz'" in line_of_failure(asked(running, "sequence", "zz"))
    missing = run_octavo("check", OCTAVO_KV_ADDRESS=running.address, OCTAVO_POOL_ID="nowhere")
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
    assert "another process serves" in line_of_failure(run_octavo("kv-manager", "--kv-address", running.address))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = f"127.0.0.1:{listening.getsockname()[1]}"
        assert "the port is in use" in line_of_failure(run_octavo("kv-manager", "--kv-address", port))
        given = ("--kv-address", f"unix:{tmp_path}/k.sock", "--kv-metrics-address", port)
        assert "Cannot serve metrics" in line_of_failure(run_octavo("kv-manager", *given))
        assert not (tmp_path / "k.sock").exists()
    assert "'loud' is refused" in line_of_failure(run_octavo("kv-manager", "--log-level", "loud"))
    assert "no.yaml" in line_of_failure(run_octavo("kv-manager", OCTAVO_CONFIG=str(tmp_path / "no.yaml")))
    assert "both --tls-cert and --tls-key" in line_of_failure(run_octavo("kv-manager", "--tls-cert", "c.pem"))


def test_help_says_units_defaults_and_variables() -> None:
    done = run_octavo("kv-manager", "--help", COLUMNS="200")
    assert done.returncode == 0
    for expected in (
        "Seconds that calls may go on",
        "OCTAVO_GRACE_SECONDS",
        "(10)",
        "--kv-metrics-address",
        "127.0.0.1:9401",
    ):
        assert expected in done.stdout
