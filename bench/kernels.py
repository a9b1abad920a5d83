"""The CPU kernels against what the machine can do: python -m bench.kernels.

Prints shares and ratios of one run: products as a share of the measured multiply-add peak, beside torch's; attention of
one layer as a share of the measured read bandwidth, in pages and with all pages in a row; decode steps of the demo
model beside plain torch. Ways that are compared take turns, and the best of some turns counts: the machine may be busy.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from unittest import mock

import torch
from torch.nn import functional

from model_runner import native
from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.executor import TorchExecutor
from model_runner.loading import demo_model_path, load_model

CPU = torch.device("cpu")
BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
LAYERS = {"qkv": (960, 576), "gate_up": (3072, 576), "down": (576, 1536)}
"""The demo model's matrices."""
PEAK_TURNS = 2_000_000
READ_FLOATS = 1 << 27


def best(ways: dict[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Seconds of the best turn of each; the ways take turns."""
    for way in ways.values():
        way()
    seconds: dict[str, float] = dict.fromkeys(ways, float("inf"))
    for _ in range(turns):
        for name, way in ways.items():
            start = perf_counter()
            way()
            seconds[name] = min(seconds[name], perf_counter() - start)
    return seconds


def machine(library: native.Library) -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    name = names[0] if info.exists() and names else platform.processor()
    return f"{name}, {library.threads} threads, {library.instruction_set}, torch {torch.__version__}"


def products(library: native.Library, rows: list[int], turns: int) -> None:
    print(f"\n{'rows':>5} {'matrix':>8} {'torch fp32':>11} " + " ".join(f"{form:>16}" for form in native.FORMS))
    for name, (outputs, inputs) in LAYERS.items():
        weights = torch.randn(outputs, inputs)
        matrices = {form: native.Matrix(form, outputs, inputs) for form in native.FORMS}
        for matrix in matrices.values():
            matrix.fill(0, weights)
        for count in rows:
            x = torch.randn(count, inputs)
            ways: dict[str, Callable[[], object]] = {
                "peak": lambda: library.call("octavo_probe_multiply_add", PEAK_TURNS // 10),
                "torch": lambda x=x, weights=weights: functional.linear(x, weights),
            }
            ways |= {form: lambda x=x, matrix=matrix: matrix.multiply(x) for form, matrix in matrices.items()}
            took = best(ways, turns)
            peak = library.call("octavo_probe_multiply_add", 1) * (PEAK_TURNS // 10) / took["peak"]
            shares = {way: 2 * count * outputs * inputs / seconds / peak for way, seconds in took.items()}
            print(
                f"{count:>5} {name:>8} {shares['torch']:>11.0%} "
                + " ".join(f"{shares[form]:>8.0%} {took['torch'] / took[form]:5.1f} x" for form in native.FORMS)
            )


def attention(library: native.Library, batch: int, context: int, turns: int) -> None:
    """Several layers in a row, so that one's K/V are out of the caches when its turn comes again."""
    layers = 16
    memory = torch.zeros(READ_FLOATS)
    for dtype in (torch.float32, torch.bfloat16):
        width = context // BLOCK_SIZE
        shape = AttentionShape(
            layers, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, batch * width + 1, dtype, CPU, sliding_window=None
        )
        one_page = AttentionShape(
            layers, HEADS, KV_HEADS, HEAD_DIM, context, batch + 1, dtype, CPU, sliding_window=None
        )
        order = (torch.randperm(batch * width) + 1).tolist()
        ways: dict[str, Callable[[], object]] = {
            "read": lambda: library.call("octavo_probe_read", memory.data_ptr(), READ_FLOATS)
        }
        for name, backend, tables in (
            ("paged", create_backend("cpu", shape), [order[row * width : (row + 1) * width] for row in range(batch)]),
            ("contiguous", create_backend("cpu", one_page), [[row + 1] for row in range(batch)]),
            (
                "torch",
                create_backend("cpu_torch", shape),
                [order[row * width : (row + 1) * width] for row in range(batch)],
            ),
        ):
            ways[name] = attention_step(backend, tables, context)
        took = best(ways, turns)
        size = 2 * batch * context * KV_HEADS * HEAD_DIM * dtype.itemsize * layers
        bandwidth = READ_FLOATS * 4 / took["read"]
        print(
            f"attention {str(dtype).removeprefix('torch.')}, batch {batch}, context {context}: "
            f"{size / took['paged'] / bandwidth:.0%} of the read bandwidth ({bandwidth / 1e9:.1f} GB/s), "
            f"paged / contiguous {took['paged'] / took['contiguous']:.3f}, "
            f"torch / ours {took['torch'] / took['paged']:.1f}"
        )


def attention_step(backend: AttentionBackend, tables: list[list[int]], context: int) -> Callable[[], None]:
    entries = [BatchEntry([0], context - 1, table, True) for table in tables]
    batch = pack_batch(entries, backend.shape.block_size, CPU)
    queries, keys, values = (torch.randn(len(tables), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))

    def run() -> None:
        backend.plan(batch)
        for layer in range(backend.shape.num_layers):
            backend.run(layer, queries, keys, values)

    return run


def steps(forms: list[str], turns: int) -> None:
    models = {form: load_model(demo_model_path(), weights_dtype=form) for form in forms}
    with mock.patch("model_runner.loading.library", return_value=None):
        models["torch"] = load_model(demo_model_path(), weights_dtype="float32")
    for sequences, context, tokens in ((1, 512, 1), (16, 512, 1), (64, 192, 1), (1, 128, 128), (4, 128, 128)):
        ways = {}
        for name, loaded in models.items():
            c, width = loaded.config, context // BLOCK_SIZE
            shape = AttentionShape(
                c.num_layers,
                c.num_heads,
                c.num_kv_heads,
                c.head_dim,
                BLOCK_SIZE,
                sequences * width + 1,
                torch.float32,
                CPU,
            )
            order = (torch.randperm(sequences * width) + 1).tolist()
            entries = [
                BatchEntry([5] * tokens, context - tokens, order[row * width : (row + 1) * width], True)
                for row in range(sequences)
            ]
            backend = create_backend("cpu_torch" if name == "torch" else "cpu", shape)
            executor = TorchExecutor(loaded.model, backend, BLOCK_SIZE, CPU)
            ways[name] = lambda executor=executor, entries=entries: executor.execute(entries, [])
        took = best(ways, turns)
        print(
            f"step of {sequences} x {tokens} tokens at context {context}: "
            + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in took.items())
            + "; torch / ours "
            + ", ".join(f"{took['torch'] / took[form]:.1f}" for form in forms)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 512])
    parser.add_argument("--forms", nargs="+", default=["auto", "float32", "bfloat16"])
    given = parser.parse_args()
    library = native.need_library()
    torch.set_num_threads(given.threads)
    library.set_threads(given.threads)
    print(machine(library))
    start = perf_counter()
    done = library.call("octavo_probe_multiply_add", PEAK_TURNS)
    print(f"multiply-add peak: {done / (perf_counter() - start) / 1e9:.0f} GFLOP/s in one try")
    products(library, given.rows, given.turns)
    attention(library, 16, 512, given.turns)
    steps(given.forms, given.turns)


if __name__ == "__main__":
    main()
