"""The measure for GPUs, in small on a CPU: counts against other counts, and no part takes another one down."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.gpu.__main__ import why_not
from bench.gpu.attention import contiguous_decode, in_turn, layers_of
from bench.gpu.counts import (
    causal_attention_flops,
    decode_bytes,
    kv_bytes_per_token,
    linear_flops,
    matmul_flops,
    num_parameters,
)
from bench.gpu.paged import decode_entries, make, rows, shape_of, tables
from bench.gpu.parts import BY_BACKEND, MARK, Task, command_of, is_right, run_apart, run_here
from bench.gpu.place import FULL, LLAMA_3_8B, QUICK, TINY, Place
from bench.gpu.plan import has_failed, run_all
from bench.gpu.random_model import RandomWeights, random_model
from bench.gpu.report import table
from bench.gpu.serving import batch_of, setup_of
from bench.split import QUICK as SPLIT_QUICK
from bench.split import Case, blocks_of, measure_with
from model_runner.attention import AttentionBackend
from model_runner.batch import BatchEntry, StepBatch, pack_batch
from model_runner.stream_steps import StreamSteps
from services.model_setup import Setup
from tests.model_runner.test_device_copies import SlowLane

CPU = torch.device("cpu")
PLACE = Place(CPU, QUICK, 0.001)
PATIENCE_SECONDS = 120


class NoAttention(AttentionBackend):
    """Gives queries back, so that what is counted is all else."""

    name = "none"

    def plan(self, batch: StepBatch) -> None:
        pass

    def run(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return queries

    def _slots(self, cache: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor) -> Any:
        raise NotImplementedError


def test_the_shape_is_that_of_llama_3_8b():
    # 8.03 billion, as published with the model.
    assert num_parameters(LLAMA_3_8B) == 8_030_261_248
    # "128 KiB per token": 32 layers, 8 heads of 128, K and V, 2 bytes.
    assert kv_bytes_per_token(LLAMA_3_8B, 2) == 131_072


def test_random_weights_have_the_numbers_that_are_counted():
    weights = RandomWeights(TINY, torch.float32, CPU)
    assert sum(weights.load(name).numel() for name in weights.names()) == num_parameters(TINY)
    assert weights.total_bytes == 4 * num_parameters(TINY)
    model = random_model(TINY, torch.float32, CPU).model
    entries = [BatchEntry([1, 2, 3], 0, [1], 1)]
    backend = make("reference", shape_of(PLACE, 2))
    logits = model.forward(pack_batch(entries, PLACE.block_size, CPU), backend)
    assert logits.shape == (1, TINY.vocab_size)
    assert logits.isfinite().all()


def test_products_with_weights_are_counted_as_torch_counts_them():
    model = random_model(TINY, torch.float32, CPU).model
    batch = pack_batch([BatchEntry([1] * 5, 0, [1], 2), BatchEntry([2], 3, [2], 1)], PLACE.block_size, CPU)
    with FlopCounterMode(display=False) as counter:
        model.forward(batch, NoAttention(shape_of(PLACE, 3)))
    assert linear_flops(TINY, tokens=6, rows=3) == counter.get_total_flops()


def test_attention_is_counted_pair_by_pair():
    pairs = sum(1 for query in range(48) for key in range(48) if key <= query)
    assert causal_attention_flops(4, 16, 48) == pairs * 4 * (matmul_flops(1, 16, 1) + matmul_flops(1, 1, 16))
    later = causal_attention_flops(4, 16, 48, first=32)
    assert later == causal_attention_flops(4, 16, 48) - causal_attention_flops(4, 16, 32)
    queries, keys = torch.zeros(4, 1, 16), torch.zeros(4, 48, 16)
    with FlopCounterMode(display=False) as counter:
        torch.bmm(torch.bmm(queries, keys.transpose(1, 2)), keys)
    assert causal_attention_flops(4, 16, 48, first=47) == counter.get_total_flops()


def test_bytes_of_a_decode_step_are_those_of_its_tensors():
    place, lengths = PLACE, [3, 5]
    queries, keys, values = rows(place, len(lengths))
    cache = [torch.zeros(length, TINY.num_kv_heads, TINY.head_dim) for length in lengths]
    expected = 2 * sum(each.nbytes for each in cache) + 2 * queries.nbytes + keys.nbytes + values.nbytes
    assert decode_bytes(TINY, lengths, 4) == expected == 14_336


def test_contiguous_and_paged_attention_are_about_the_same_thing():
    """With K/V of zeros both average zeros, but for the token that the step writes itself."""
    backend = make("reference", shape_of(PLACE, 1 + 3 * 3, num_layers=1))
    batch = pack_batch(decode_entries(PLACE, 3, QUICK.context), PLACE.block_size, CPU)
    queries, keys, values = rows(PLACE, 3)
    backend.plan(batch)
    paged = backend.run(0, queries, keys * 0, values)
    assert contiguous_decode(PLACE, 3, queries, 1)(0)[:, :, 0].shape == paged.shape
    shared = values.repeat_interleave(TINY.num_heads // TINY.num_kv_heads, dim=1)
    torch.testing.assert_close(paged, shared / QUICK.context)


@pytest.mark.parametrize("shuffled", [False, True])
def test_block_tables_share_nothing(shuffled: bool):
    made = tables(PLACE, 3, 40, shuffled=shuffled)
    blocks = [block for each in made for block in each]
    assert sorted(blocks) == list(range(1, 10))
    assert (blocks == sorted(blocks)) is not shuffled


def test_a_batch_of_generate_is_what_its_bytes_hold():
    # 2 x 8 tokens of 2 x 2 layers x 2 heads x 64 x 4 bytes.
    assert batch_of(PLACE) == (1 << 18) // (16 * 2048) == 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_a_gpu_only_the_small_measure_can_be_had():
    assert why_not(torch.device("cuda"), quick=True) is not None
    assert why_not(CPU, quick=False) == "The sizes are those of a GPU; on cpu only --quick is of use."
    assert why_not(CPU, quick=True) is None


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "its process ended with -9: no word"),
        ("raise RuntimeError('an illegal access')", "its process ended with 1: RuntimeError: an illegal access"),
        ("print('something else')", "its process ended with 0: no word"),
    ],
)
def test_a_part_that_breaks_its_process_says_so(code: str, reason: str):
    assert run_apart(script(code), PATIENCE_SECONDS) == {"failed": reason}


def test_a_part_that_hangs_is_ended():
    assert run_apart(script("import time; time.sleep(600)"), 0.5) == {"failed": "it was not ready after 0 s"}


def test_what_a_part_had_is_kept_when_it_hangs_or_breaks():
    had = f"import time; print({MARK!r} + '{{\"right\": 1}}'); print({MARK!r} + '{{\"right\": 2}}', flush=True)"
    assert run_apart(script(f"{had}; time.sleep(600)"), 5) == {"right": 2, "cut_short": "it was not ready after 5 s"}
    broken = run_apart(script(f"{had}; raise RuntimeError('an illegal access')"), PATIENCE_SECONDS)
    assert broken == {"right": 2, "failed": "its process ended with 1: RuntimeError: an illegal access"}
    assert is_right({"ok": True, "cut_short": "it was not ready after 5 s"})
    assert not is_right({"ok": True} | broken)


def test_what_a_part_has_started_ends_with_it():
    """A compiler that goes on would take the cores from the next part."""
    started = "import subprocess, time; child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL)"
    told = f"print({MARK!r} + '{{\"pid\": ' + str(child.pid) + '}}', flush=True)"
    found = run_apart(script(f"{started}; {told}; time.sleep(600)"), 5)
    assert "cut_short" in found
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_running(found["pid"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(found["pid"])


def is_running(pid: object) -> bool:
    """A killed process takes a moment to end, and then may be there as a zombie, if nobody has asked for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_part_in_a_process_of_its_own():
    noise = f"print('noise'); print({MARK!r} + '{{\"us\": 1.5}}')"
    assert run_apart(script(noise), PATIENCE_SECONDS) == {"us": 1.5}
    found = run_apart(command_of(Task("facts"), "cpu", quick=True), PATIENCE_SECONDS)
    assert found["torch"] == torch.__version__


def test_a_part_that_raises_loses_nothing_else(monkeypatch: pytest.MonkeyPatch):
    def broken(place: Place, backend: str) -> dict[str, object]:
        raise RuntimeError(f"no kernel\nfor {backend}")

    monkeypatch.setitem(BY_BACKEND, "attention", broken)
    assert run_here(Task("attention", "cpu"), PLACE) == {"failed": "RuntimeError: no kernel for cpu"}


def test_figures_that_came_before_a_part_raises_are_kept(monkeypatch: pytest.MonkeyPatch):
    def breaks(place: Place, backend: str) -> Iterator[dict[str, object]]:
        yield {"right": 1}
        raise RuntimeError("no kernel")

    monkeypatch.setitem(BY_BACKEND, "correctness", breaks)
    seen: list[object] = []
    assert run_here(Task("correctness", "cpu"), PLACE, seen.append) == {"right": 1, "failed": "RuntimeError: no kernel"}
    assert seen == [{"right": 1}]


def test_small_batches_go_through_more_layers_than_a_gpu_has_caches_for():
    """Of Llama 3 8B in bfloat16 2,048 tokens are 8 MiB a layer."""
    place = Place(CPU, FULL, 0.001)
    assert [layers_of(place, batch) for batch in (1, 16, 64, 256)] == [32, 4, 1, 1]
    seen: list[object] = []
    call = in_turn(3, seen.append)
    for _ in range(7):
        call()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_the_split_is_measured_with_steps_in_the_stream(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: each side launches a step before the one before it has landed."""
    lanes: list[SlowLane] = []

    def in_the_stream(setup: Setup) -> StreamSteps:
        lanes.append(SlowLane())
        return StreamSteps(setup.executor, lanes[-1])

    monkeypatch.setattr(Setup, "steps", in_the_stream)
    case, plan = Case("2", 2), SPLIT_QUICK
    setup = setup_of(PLACE, random_model(TINY, torch.float32, CPU), "cpu_torch", blocks_of(case, plan), 2)
    setup = replace(setup, options=replace(setup.options, async_steps=True))
    figures = measure_with(setup, case, plan)
    assert figures["ratio_2"] > 0
    assert len(lanes) == 2
    assert all(lane.given > 2 * plan.steps for lane in lanes)


def planned(seconds: float, wrong: str = "", broken: str = "") -> tuple[list[str], dict]:
    ran: list[str] = []

    def run(task: Task) -> dict[str, object]:
        ran.append(task.name)
        if task.name == broken:
            return {"failed": "broken"}
        return {"ok": task.backend != wrong} if task.part == "correctness" else {}

    return ran, run_all(["one", "two"], seconds, run, lambda task, results: None)


def test_a_backend_that_is_wrong_is_not_measured():
    ran, _ = planned(PATIENCE_SECONDS, wrong="one")
    assert ran == [
        *("facts", "speeds", "correctness of one", "correctness of two", "steps of two", "attention of two"),
        *("split of two", "huggingface of two", "shapes of two"),
    ]


def test_a_part_that_failed_takes_nobody_with_it():
    ran, results = planned(PATIENCE_SECONDS, broken="attention of one")
    assert ran[4:] == [
        *("steps of one", "attention of one", "attention of two", "split of one", "huggingface of one"),
        *("steps of two", "shapes of one", "shapes of two"),
    ]
    assert results["attention"] == {"one": {"failed": "broken"}, "two": {}}
    assert has_failed(results)
    assert not has_failed(planned(PATIENCE_SECONDS)[1])


def test_what_is_not_timed_runs_at_once():
    """While FlashInfer compiles, the others are checked; what is measured runs alone."""
    meeting = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    running: set[str] = set()

    def run(task: Task) -> dict[str, object]:
        running.add(task.name)
        if task.part in ("correctness", "shapes"):
            meeting.wait()
        else:
            assert running == {task.name}
        running.discard(task.name)
        return {"ok": True}

    results = run_all(["one", "two"], PATIENCE_SECONDS, run, lambda task, results: None, workers=2)
    assert list(results["shapes"]) == ["one", "two"]


def test_when_the_time_is_over_the_rest_is_skipped():
    ran, results = planned(0.0)
    assert ran == []
    assert results["speeds"] == {"": {"skipped": "the 0 s were over"}}
    assert "the 0 s were over" in table(results)


def test_all_of_it_in_small():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = run_all(
            ["cpu_torch", "reference"],
            PATIENCE_SECONDS,
            lambda task: run_here(task, PLACE),
            lambda task, results: None,
        )
    finally:
        torch.set_num_threads(threads)
    assert not has_failed(results), json.dumps(results)
    for name in ("cpu_torch", "reference"):
        assert results["correctness"][name] == {"ok": True, "right": 1, "refused": {}, "wrong": {}}
        assert results["shapes"][name]["ok"]
        assert results["shapes"][name]["wrong"] == {}
        for batch in map(str, QUICK.batches):
            one = results["attention"][name]["decode"][batch]
            assert one["bytes"] == decode_bytes(TINY, [QUICK.context] * int(batch), 4)
            assert one["gb_s"] == pytest.approx(one["bytes"] / one["us"] / 1e3)
            step = results["steps"][name][batch]
            assert step["tokens_s"] == pytest.approx(int(batch) / step["ms"] * 1e3)
            assert step["graphs"] == "skipped: there are none on cpu"
    assert results["split"]["cpu_torch"]["ratio"] > 0
    assert json.loads(json.dumps(results)) == results
    lines = table(results).splitlines()
    assert len({len(line.split("  ")) >= 3 for line in lines}) == 1
    for part in ("correctness", "decode attention", "prefill attention", "step", "split", "huggingface"):
        assert any(line.startswith(part) for line in lines), part


def test_a_wrong_backend_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.gpu.correctness.why_broken", lambda kind, shape: "off by 1")
    found = run_here(Task("correctness", "reference"), PLACE)
    assert not found["ok"]
    assert has_failed({"correctness": {"reference": found}})
