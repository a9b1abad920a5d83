"""Workloads A, B and C through the engine in one process, with the CPU kernels and without them.

python -m bench.workloads [FILE]: a JSON object of {name: {"prompts": [token ids...], "max_tokens": n}}. All requests of
a workload come at once; greedy, EOS ignored, no cached prefix at first. Each side is a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.serve.workloads import RECORDED

SIDES = {"kernels": {}, "torch": {"OCTAVO_NATIVE": "0"}}


def run_all(file: Path, names: list[str], limit: int) -> dict[str, dict[str, float]]:
    """Each workload on a fresh pool, in this process: its figures by name."""
    from services.config import ModelRunnerSettings
    from services.model_setup import set_up_model

    setup = set_up_model(ModelRunnerSettings(log_format="json", kv_cache_memory=1 << 30))
    workloads = json.loads(file.read_text())
    figures = {}
    for name in names:
        workload = workloads[name]
        prompts = workload["prompts"][:limit] if limit else workload["prompts"]
        figures[name] = run_workload(setup, prompts, workload["max_tokens"])
    return figures


def run_workload(setup: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, float]:
    from kvmanager import KvManager
    from model_runner.engine import Engine
    from model_runner.request import Chunk, GenerateRequest, SamplingParams, StopConditions
    from services.books_inprocess import InProcessBooks

    arrivals: dict[str, list[float]] = {str(index): [] for index in range(len(prompts))}
    left, all_ended = len(prompts), threading.Event()

    def take(items: Sequence[Any]) -> None:
        nonlocal left
        now = perf_counter()
        for item in items:
            if not isinstance(item, Chunk):
                raise RuntimeError(item)
            arrivals[item.request_id] += [now] * len(item.token_ids)
            left -= item.usage is not None
        if not left:
            all_ended.set()

    engine = Engine(setup.executor, InProcessBooks(KvManager("bench")), setup.tokenizer, setup.options, take)
    start = perf_counter()
    sampling = SamplingParams(temperature=0.0)
    for name, prompt in zip(arrivals, prompts, strict=True):
        stop = StopConditions(max_tokens=max_tokens, stop_strings=(), stop_token_ids=frozenset(), ignore_eos=True)
        engine.submit(GenerateRequest(name, tuple(prompt), sampling, stop))
    engine.start()
    all_ended.wait()
    seconds = perf_counter() - start
    engine.stop()
    times = [each for each in arrivals.values() if len(each) > 1]
    gaps = [later - earlier for each in times for earlier, later in pairwise(each)]
    return {
        "output tokens/s": sum(map(len, arrivals.values())) / seconds,
        "TTFT ms": 1e3 * statistics.median(each[0] - start for each in times),
        "ms between tokens": 1e3 * statistics.median(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=RECORDED)
    parser.add_argument("--names", nargs="+", default=["A", "B", "C"])
    parser.add_argument("--limit", type=int, default=0, help="requests of each workload, at most; 0 for all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", action="store_true", help="one side, in this process, as JSON")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(run_all(given.file, given.names, given.limit)))
        return
    rounds: dict[str, list[dict[str, dict[str, float]]]] = {side: [] for side in SIDES}
    for _ in range(given.rounds):
        for side, env in SIDES.items():
            command = [sys.executable, "-m", "bench.workloads", *sys.argv[1:], "--here"]
            done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True)
            rounds[side].append(json.loads(done.stdout.splitlines()[-1]))
    for name in given.names:
        for figure in rounds["kernels"][0][name]:
            ours, torchs = ([each[name][figure] for each in rounds[side]] for side in SIDES)
            ratio = statistics.median(one / other for one, other in zip(ours, torchs, strict=True))
            print(
                f"{name} {figure}: kernels {statistics.median(ours):.1f}, torch {statistics.median(torchs):.1f}; "
                f"kernels / torch {ratio:.2f}"
            )


if __name__ == "__main__":
    main()
