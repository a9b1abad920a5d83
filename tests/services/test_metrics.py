"""What a scrape shows, against values derived from the calls that were made."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from octavo.kv.v1 import kv_manager_pb2 as pb
from prometheus_client import CollectorRegistry, Gauge, disable_created_metrics, generate_latest

from model_runner.observer import EngineObserver, PhaseSeconds, StepReport
from model_runner.request import FinishReason, Usage
from services.errors import StartupError
from services.metrics import new_registry, on_loop, start_metrics_server
from services.runner_metrics import RunnerMetrics
from services.tenant_labels import TenantLabels
from tests.services.kv_support import kv_settings, kv_stub, running_kv_manager, samples, scrape

POOL = (("pool", "default"),)
BLOCK_TIMES = tuple(f"octavo_kv_block_{what}" for what in ("lifetime", "idle_before_evict", "reuse_gap", "return"))


def of_pool(found: dict[Any, float]) -> dict[str, float]:
    """The samples that have no label but the pool, by their name without the prefix; without those of histograms."""
    return {
        name.removeprefix("octavo_kv_"): value
        for (name, labels), value in found.items()
        if labels == POOL and not name.startswith(BLOCK_TIMES)
    }


def block_times(found: dict[Any, float]) -> dict[str, float]:
    """How many blocks are in each histogram of a block's times."""
    return {
        name.removeprefix("octavo_kv_block_").removesuffix("_seconds_count"): value
        for (name, labels), value in found.items()
        if labels == POOL and name.startswith(BLOCK_TIMES) and name.endswith("_count")
    }


def blocks(found: dict[Any, float]) -> dict[str, float]:
    return {dict(labels)["state"]: value for (name, labels), value in found.items() if name == "octavo_kv_blocks"}


def failures(found: dict[Any, float]) -> dict[str, float]:
    name = "octavo_kv_allocation_failures_total"
    return {dict(labels)["reason"]: value for (each, labels), value in found.items() if each == name}


def test_the_books_are_shown_while_idle(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        spec = pb.PoolSpec(num_blocks=9, block_size=4, bytes_per_block=64, model_fingerprint="m")
        epoch = stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="r")).epoch
        # a: 10 tokens in 3 blocks, all computed; then forked, and both write: one copy of the tail of 2 tokens.
        stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=range(10)))
        stub.Append(pb.AppendRequest(appends=[pb.SequenceAppend(sequence_id="a", computed_tokens=10)]))
        stub.Fork(pb.ForkRequest(parent_id="a", child_ids=["b"]))
        appends = [pb.SequenceAppend(sequence_id=each, token_ids=[1], computed_tokens=10) for each in "ab"]
        stub.Append(pb.AppendRequest(appends=appends))
        # c hits the two full blocks (8 of its 9 tokens), takes one more, and is freed before it computes.
        stub.Allocate(pb.AllocateRequest(sequence_id="c", token_ids=range(9)))
        stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id=each) for each in ("c", "nobody")]))
        with pytest.raises(grpc.RpcError, match="5 blocks are needed, 4 are free"):
            stub.Allocate(pb.AllocateRequest(sequence_id="d", token_ids=range(100, 120)))
        found = scrape(running.metrics_address)

    assert blocks(found) == {"held": 4, "cached": 0, "free": 4}
    shown = of_pool(found)
    assert shown == {
        "usable_blocks": 8,
        "available_blocks": 4,
        "block_references": 6,  # a and b have three entries each
        "shared_blocks": 2,
        "pinned_blocks": 0,
        "leased_blocks": 0,
        "index_names": 2,
        "usage_ratio": 0.5,
        "stored_tokens": 12,  # two full blocks, and two tails of 2
        "reserved_tokens": 16,
        "sequences": 2,
        "session_silent_seconds": 0,
        "books_imbalance": 0,
        "allocated_blocks_total": 5,  # 3 for a, 1 copy, 1 for c
        "reused_blocks_total": 0,  # the hit blocks were held, not cached
        "freed_blocks_total": 1,
        "evicted_blocks_total": 0,
        "removed_blocks_total": 0,
        "index_events_total": 1,  # both names of a's full blocks were stored at once
        "forks_total": 1,
        "copies_total": 1,
        "prefix_query_tokens_total": 19,
        "prefix_hit_tokens_total": 8,
        "unknown_frees_total": 1,
    }
    assert failures(found) == {"pool": 1, "quota": 0, "pins": 0}
    facts = {
        "num_blocks": "9",
        "block_size": "4",
        "bytes_per_block": "64",
        "model_fingerprint": "m",
        "hash_algorithm": "sha256",
        "prefix_index": "hash",
        "eviction_policy": "adaptive",
        "epoch": str(epoch),
    }
    assert found["octavo_kv_pool_info", tuple(sorted((facts | {"pool": "default"}).items()))] == 1
    service = ("service", "octavo.kv.v1.KvManagerService")
    count = "octavo_rpc_duration_seconds_count"
    assert found[count, (("code", "OK"), ("method", "Allocate"), service)] == 2
    assert found[count, (("code", "RESOURCE_EXHAUSTED"), ("method", "Allocate"), service)] == 1
    assert any(name == "octavo_build_info" for name, _ in found)
    assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_what_is_cached_pinned_removed_and_evicted_is_shown(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        spec = pb.PoolSpec(num_blocks=9, block_size=4)
        stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="r"))
        # Three prompts that end: two pinned blocks, two blocks of another, and one that is removed again.
        cache(stub, range(8), retention=pb.Retention(pin_seconds=3600))
        cache(stub, range(50, 58))
        cache(stub, range(90, 94))
        stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=range(90, 94)))
        found = scrape(running.metrics_address)
        assert blocks(found) == {"held": 0, "cached": 4, "free": 4}
        shown = of_pool(found)
        assert (shown["pinned_blocks"], shown["index_names"], shown["removed_blocks_total"]) == (2, 4, 1)
        assert shown["index_events_total"] == 4  # stored, three times, and removed
        # 5 blocks where 4 are free: the end of the second prompt is given up.
        stub.Allocate(pb.AllocateRequest(sequence_id="a", token_ids=range(100, 120)))
        found = scrape(running.metrics_address)
        shown = of_pool(found)
        assert (shown["pinned_blocks"], shown["index_names"], shown["evicted_blocks_total"]) == (2, 3, 1)
        assert shown["available_blocks"] == 1
        assert block_times(found) == {"lifetime": 1, "idle_before_evict": 1, "reuse_gap": 0, "return": 0}
        # The prompt that is left is hit, both its blocks; what was given up comes back.
        stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="a")]))
        cache(stub, range(50, 58))
        cache(stub, range(9))
        found = scrape(running.metrics_address)
        assert block_times(found) == {"lifetime": 1, "idle_before_evict": 1, "reuse_gap": 3, "return": 1}
        gap = "octavo_kv_block_reuse_gap_seconds"
        assert found[f"{gap}_bucket", (("le", "+Inf"), *POOL)] == 3
        # Three of eight blocks are to be pinned beside two where half may be; and a salt's quota is full.
        with pytest.raises(grpc.RpcError, match="3 blocks are to be pinned"):
            stub.Allocate(
                pb.AllocateRequest(sequence_id="b", token_ids=range(12), retention=pb.Retention(pin_seconds=9))
            )
        stub.SetQuota(pb.SetQuotaRequest(salt="s", max_blocks=1))
        stub.Allocate(pb.AllocateRequest(sequence_id="c", token_ids=[1], scope=pb.CacheScope(salt="s")))
        for _ in range(2):
            with pytest.raises(grpc.RpcError, match="quota of 1 leaves 0"):
                stub.Allocate(pb.AllocateRequest(sequence_id="d", token_ids=[1], scope=pb.CacheScope(salt="s")))
        stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="c")]))
        found = scrape(running.metrics_address)
        assert failures(found) == {"pool": 0, "quota": 2, "pins": 1}
        shown = of_pool(found)
        assert (shown["removed_blocks_total"], shown["index_events_total"]) == (1, 6)
        # Another runner finds an empty pool; its counters begin anew, and the numbers of events go on.
        stub.OpenPool(pb.OpenPoolRequest(spec=spec, runner_id="another"))
        shown = of_pool(scrape(running.metrics_address))
        assert (shown["pinned_blocks"], shown["index_names"], shown["removed_blocks_total"]) == (0, 0, 0)
        assert shown["index_events_total"] == 7  # cleared


def cache(stub: Any, tokens: range, **more: Any) -> None:
    stub.Allocate(pb.AllocateRequest(sequence_id="x", token_ids=tokens, **more))
    stub.Free(pb.FreeRequest(sequences=[pb.SequenceAppend(sequence_id="x", computed_tokens=len(tokens))]))


def test_a_closed_pool_is_no_longer_shown(tmp_path: Path) -> None:
    with running_kv_manager(kv_settings(tmp_path)) as running, kv_stub(running.address) as stub:
        assert of_pool(scrape(running.metrics_address)) == {}
        spec = pb.PoolSpec(num_blocks=2, block_size=1)
        stub.OpenPool(pb.OpenPoolRequest(pool_id="p", spec=spec, runner_id="r"))
        assert blocks(scrape(running.metrics_address)) == {"free": 1, "cached": 0, "held": 0}
        stub.ClosePool(pb.ClosePoolRequest(pool_id="p"))
        assert blocks(scrape(running.metrics_address)) == {}


def test_the_runner_counts_what_its_engine_tells() -> None:
    # As new_registry() does, for the whole process; without what it adds to the registry.
    disable_created_metrics()
    registry = CollectorRegistry()
    waiting = [1, 2, 3]
    metrics = RunnerMetrics(registry, running=lambda: 2, waiting=lambda: len(waiting))
    observer: EngineObserver = metrics
    report = StepReport(
        PhaseSeconds(schedule=0.25, kv=0.5, forward=2.0, sample=1.0, deliver=0.125),
        prefill_tokens=100,
        generated_tokens=3,
        preemptions=1,
        sequences=4,
    )
    observer.on_step(report)
    observer.on_step(report)
    observer.on_progress(generated_tokens=6, preemptions=2)
    observer.on_first_token(0.5)
    observer.on_next_token(0.25)
    observer.on_next_token(0.5)
    observer.on_finish(FinishReason.LENGTH, usage(prompt_tokens=10, cached_tokens=4), "acme")
    observer.on_finish(None, usage(prompt_tokens=5, cached_tokens=0), "")
    found = {
        key: value for key, value in samples(generate_latest(registry).decode()).items() if "_bucket" not in key[0]
    }

    name = "octavo_runner_{}".format
    assert found[name("requests"), (("state", "running"),)] == 2
    assert found[name("requests"), (("state", "waiting"),)] == 3
    waiting.clear()
    assert registry.get_sample_value(name("requests"), {"state": "waiting"}) == 0
    totals = {key[0]: value for key, value in found.items() if key[0].endswith("_total") and not key[1]}
    assert totals == {
        name("prompt_tokens_total"): 15,
        name("cached_prompt_tokens_total"): 4,
        name("generation_tokens_total"): 6,
        name("prefill_tokens_total"): 200,
        name("preemptions_total"): 2,
        name("draft_tokens_total"): 16,
        name("accepted_draft_tokens_total"): 4,
        name("pauses_total"): 6,
    }
    by_tenant = {(key[0], dict(key[1])["tenant"]): value for key, value in found.items() if "tenant_" in key[0]}
    assert by_tenant == {
        (name("tenant_requests_total"), "acme"): 1,
        (name("tenant_requests_total"), ""): 1,
        (name("tenant_prompt_tokens_total"), "acme"): 10,
        (name("tenant_prompt_tokens_total"), ""): 5,
        (name("tenant_generation_tokens_total"), "acme"): 2,
        (name("tenant_generation_tokens_total"), ""): 2,
    }
    finished = {dict(key[1])["reason"]: value for key, value in found.items() if "finished_total" in key[0]}
    assert finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    phases = {dict(key[1])["phase"]: value for key, value in found.items() if key[0] == name("step_phase_seconds_sum")}
    assert phases == {"schedule": 0.5, "kv": 1, "forward": 4, "sample": 2, "deliver": 0.25}
    sums = {key[0]: value for key, value in found.items() if key[0].endswith("_sum") and not key[1]}
    assert sums == {
        name("time_to_first_token_seconds_sum"): 0.5,
        name("inter_token_latency_seconds_sum"): 0.75,
        name("e2e_latency_seconds_sum"): 2 * 7,
        name("queue_time_seconds_sum"): 2,
    }


def usage(*, prompt_tokens: int, cached_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=2,
        preemptions=0,
        queue_seconds=1,
        prefill_seconds=2,
        decode_seconds=4,
        pauses=3,
        drafted_tokens=8,
        accepted_tokens=2,
    )


def test_tenants_beyond_a_hundred_share_a_label() -> None:
    labels = TenantLabels()
    names = [f"t{number}" for number in range(150)]
    assert [labels.label(name) for name in names] == [*names[:100], *["other"] * 50]
    assert [labels.label(name) for name in ("", "t99", "t100")] == ["", "t99", "other"]


def test_two_processes_worth_of_metrics_live_side_by_side() -> None:
    for component in ("kv-manager", "model-runner"):
        registry = new_registry(component)
        Gauge("octavo_same_name", "In each registry once.", registry=registry)
        assert f'component="{component}"' in generate_latest(registry).decode()


def test_a_busy_metrics_port_is_refused_when_it_was_asked_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"Cannot serve metrics on {address}: address already in use"):
            start_metrics_server(CollectorRegistry(), address, explicit=True)
        other = start_metrics_server(CollectorRegistry(), address, explicit=False)
        assert other.address != address
        assert scrape(other.address) == {}
        other.close()


@pytest.mark.parametrize("address", ["nonsense", "unix:/tmp/x", "127.0.0.1:70000"])
def test_a_bad_metrics_address_is_refused(address: str) -> None:
    with pytest.raises(StartupError):
        start_metrics_server(CollectorRegistry(), address, explicit=True)


def test_a_reading_is_taken_on_the_loop_of_the_books() -> None:
    async def work() -> None:
        read = on_loop(asyncio.get_running_loop(), threading.get_ident)
        assert await asyncio.to_thread(read) == threading.get_ident()

    asyncio.run(work())
