"""What a busy process beside costs a decode step of the demo model: python -m bench.neighbour.

A process that only counts is started and stopped in turns, pinned nowhere and as important as ours. What is fair
follows from the number of cores: on n of them our n threads and one more get n / (n + 1) of a core each, and a step
takes (n + 1) / n times as long. CPU time of a step with one thread and with all of them tells how much goes in waiting.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter, process_time

import torch

from bench.kernels import machine, step_of, torch_model
from bench.turns import LoadMeter, Way
from model_runner import native
from model_runner.loading import demo_model_path, load_model


@contextmanager
def neighbour() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each side of a round")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--with-torch", action="store_true", help="plain torch too, whose threads wait by spinning")
    given = parser.parse_args()
    library = native.need_library()
    print(f"{machine(library)}; {given.sequences} sequences at 512 tokens, mean step")
    ways = {"auto": step_of(load_model(demo_model_path()), "cpu", given.sequences, 512, 1)}
    if given.with_torch:
        ways["torch"] = step_of(torch_model(), "cpu_torch", given.sequences, 512, 1)
    cores = torch.get_num_threads()
    for name, way in ways.items():
        meter, alone, beside = LoadMeter(), [], []
        for _ in range(given.rounds):
            alone.append(mean_step(way, given.seconds))
            with neighbour():
                beside.append(mean_step(way, given.seconds))
        ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        print(
            f"{name}: {min(alone) * 1e3:.1f} ms alone, {min(beside) * 1e3:.1f} ms beside it, {ratio:.2f} times "
            f"(fair on a machine of our own: {(cores + 1) / cores:.2f}); {meter.read()}"
        )
        used = cpu_of_step(way, given.seconds)
        torch.set_num_threads(1)
        library.set_threads(1)
        print(f"{name}: CPU time of a step {used / cpu_of_step(way, given.seconds):.2f} times that with one thread")
        torch.set_num_threads(cores)
        library.set_threads(cores)


def cpu_of_step(way: Way, seconds: float) -> float:
    """Seconds of all threads, spinning included, in the median of some goes."""
    end, used = perf_counter() + seconds, []
    while len(used) < 5 or perf_counter() < end:
        start = process_time()
        for turn in range(3):
            way(turn)
        used.append((process_time() - start) / 3)
    return statistics.median(used)


def mean_step(way: Way, seconds: float) -> float:
    """All of the time counts: a step that waits long is what is looked for."""
    start, turns = perf_counter(), 0
    while perf_counter() < start + seconds:
        way(turns)
        turns += 1
    return (perf_counter() - start) / turns


if __name__ == "__main__":
    main()
