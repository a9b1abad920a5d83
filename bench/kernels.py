"""The CPU kernels against what the machine can do: python -m bench.kernels.

Products as a share of the measured multiply-add peak in float32, beside torch's. Attention of one layer as a share of
the read bandwidth, in pages and with all pages in a row, beside torch's. Decode steps of the demo model beside the time
that reading their weights and K/V takes at least, and beside plain torch. See bench.turns for how this is timed; with
--threads 1, by the thread's own time, which is the steadiest on a busy machine.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from bench.turns import Clock, LoadMeter, Way, clock_for, compare
from model_runner import native
from model_runner.attention import AttentionBackend, AttentionShape, create_backend
from model_runner.batch import BatchEntry, pack_batch
from model_runner.executor import TorchExecutor
from model_runner.loading import LoadedModel, demo_model_path, load_model
from model_runner.models.native import NativeDecoder

CPU = torch.device("cpu")
BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
MATRICES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
"""The demo model's, outputs and inputs."""
COPIES = 8
"""Of each matrix, in turn: in a model another hundred are used before the same one again."""
PEAK_TURNS = 200_000
PRODUCTS = {form: (form, "float32") for form in native.FORMS} | {
    "w8a8": ("int8", "int8"),
    "w4a8": ("int4", "int8"),
    "w8a8 channel": ("int8_channel", "int8"),
}
"""Forms of the weights and types of the activations, by the name of the column."""
READ_UNIT = 1 << 18
"""Floats; octavo_probe_read takes multiples of it."""
STEPS = ((1, 512, 1), (16, 512, 1), (64, 192, 1), (1, 128, 128), (4, 128, 128))
"""Sequences, tokens of context with the step's own, and tokens of each in the step."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The library, seconds for each comparison, and the clock."""

    library: native.Library
    seconds: float
    clock: Clock

    def compare(self, ways: dict[str, Way], patience: float = 1.0) -> dict[str, float]:
        return compare(ways, self.seconds * patience, self.clock)

    def peak(self, turn: int) -> None:
        self.library.call("octavo_probe_multiply_add", PEAK_TURNS)

    def peak_flops(self) -> int:
        return self.library.call("octavo_probe_multiply_add", 1) * PEAK_TURNS

    def read(self, memory: Tensor) -> None:
        self.library.call("octavo_probe_read", memory.data_ptr(), memory.nbytes // 4)


def machine(library: native.Library) -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    name = names[0] if info.exists() and names else platform.processor()
    return f"{name}, {library.threads} threads, {library.instruction_set}, torch {torch.__version__}"


def products(bench: Bench, rows: list[int]) -> None:
    print("\nproducts: share of the float32 multiply-add peak, and how many times as fast as torch in float32")
    print(f"{'rows':>5} {'matrix':>8} {'torch fp32':>11} " + " ".join(f"{way:>16}" for way in PRODUCTS))
    for name, (outputs, inputs) in MATRICES.items():
        weights = torch.randn(COPIES, outputs, inputs)
        matrices = {
            way: [native.Matrix(form, outputs, inputs, activations) for _ in range(COPIES)]
            for way, (form, activations) in PRODUCTS.items()
        }
        for copies in matrices.values():
            for copy, matrix in enumerate(copies):
                matrix.fill(0, weights[copy])
        for count in rows:
            x = torch.randn(count, inputs)
            ways: dict[str, Way] = {
                "peak": bench.peak,
                "torch": lambda turn, x=x, weights=weights: functional.linear(x, weights[turn % COPIES]),
            }
            ways |= {
                way: lambda turn, x=x, copies=copies: copies[turn % COPIES].multiply(x)
                for way, copies in matrices.items()
            }
            took = bench.compare(ways)
            peak = bench.peak_flops() / took["peak"]
            shares = {way: 2 * count * outputs * inputs / seconds / peak for way, seconds in took.items()}
            print(
                f"{count:>5} {name:>8} {shares['torch']:>11.0%} "
                + " ".join(f"{shares[way]:>8.0%} {took['torch'] / took[way]:5.1f} x" for way in PRODUCTS),
                flush=True,
            )


def attention(bench: Bench, sequences: int, context: int) -> None:
    """A turn is one layer of several, so that its K/V are out of the caches when its turn comes again."""
    layers = 16
    print(f"\nattention of one layer, {sequences} sequences of {context} tokens in blocks of {BLOCK_SIZE}")
    for dtype in (torch.float32, torch.bfloat16):
        width = context // BLOCK_SIZE
        rows = layers, HEADS, KV_HEADS, HEAD_DIM
        shape = AttentionShape(*rows, BLOCK_SIZE, sequences * width + 1, dtype, CPU)
        one_block_shape = AttentionShape(*rows, context, sequences + 1, dtype, CPU)
        tables = shuffled_tables(sequences, width)
        size = 2 * sequences * context * KV_HEADS * HEAD_DIM * dtype.itemsize
        in_order = [list(range(1 + row * width, 1 + (row + 1) * width)) for row in range(sequences)]
        one_block = [[row + 1] for row in range(sequences)]
        ways: dict[str, Way] = {
            "read": read_in_turn(bench, layers, size),
            "paged": attend_in_turn(create_backend("cpu", shape), tables, context),
            "in order": attend_in_turn(create_backend("cpu", shape), in_order, context),
            "one block": attend_in_turn(create_backend("cpu", one_block_shape), one_block, context),
            "torch": attend_in_turn(create_backend("cpu_torch", shape), tables, context),
        }
        took = bench.compare(ways, 4)
        contiguous = min(took["in order"], took["one block"])
        print(
            f"{str(dtype).removeprefix('torch.')}: {took['read'] / took['paged']:.0%} of the read bandwidth "
            f"({size / took['read'] / 1e9:.1f} GB/s), {took['paged'] / contiguous:.3f} times what contiguous K/V take "
            f"(blocks in order {took['in order'] / took['paged']:.3f}, one block a sequence "
            f"{took['one block'] / took['paged']:.3f}), torch / ours {took['torch'] / took['paged']:.1f}",
            flush=True,
        )


def shuffled_tables(sequences: int, width: int) -> list[list[int]]:
    order = (torch.randperm(sequences * width) + 1).tolist()
    return [order[row * width : (row + 1) * width] for row in range(sequences)]


def read_in_turn(bench: Bench, layers: int, size: int) -> Way:
    memory = native.zeros((layers, size // 4), torch.float32)
    return lambda turn: bench.read(memory[turn % layers])


def attend_in_turn(backend: AttentionBackend, tables: list[list[int]], context: int) -> Way:
    entries = [BatchEntry([0], context - 1, table, True) for table in tables]
    batch = pack_batch(entries, backend.shape.block_size, CPU)
    queries, keys, values = (torch.randn(len(tables), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    backend.plan(batch)
    return lambda turn: backend.run(turn % backend.shape.num_layers, queries, keys, values)


def steps(bench: Bench, forms: list[str], with_torch: bool) -> None:
    models = {form: load_model(demo_model_path(), weights_dtype=form) for form in forms}
    memory = native.zeros((64 * READ_UNIT,), torch.float32)
    print("\nsteps of the demo model: ms, and the share that reading its weights and K/V takes at least")
    for sequences, context, tokens in STEPS:
        ways: dict[str, Way] = {"read": lambda turn: bench.read(memory)}
        ways |= {form: step_of(loaded, "cpu", sequences, context, tokens) for form, loaded in models.items()}
        if with_torch:
            ways["torch"] = step_of(torch_model(), "cpu_torch", sequences, context, tokens)
        took = bench.compare(ways, 4)
        per_byte = took["read"] / memory.nbytes
        cells = []
        for form, loaded in models.items():
            least = per_byte * step_bytes(loaded, sequences, context)
            cells.append(f"{form} {took[form] * 1e3:.1f} ({least / took[form]:.0%})")
        beside = f"; torch {took['torch'] * 1e3:.1f}" if with_torch else ""
        print(f"{sequences} x {tokens} tokens at context {context}: {', '.join(cells)}{beside}", flush=True)


def torch_model() -> LoadedModel:
    with mock.patch("model_runner.loading.library", return_value=None):
        return load_model(demo_model_path(), weights_dtype="float32")


def step_of(loaded: LoadedModel, attention: str, sequences: int, context: int, tokens: int) -> Way:
    c, width = loaded.config, context // BLOCK_SIZE
    shape = AttentionShape(
        c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, BLOCK_SIZE, sequences * width + 1, torch.float32, CPU
    )
    executor = TorchExecutor(loaded.model, create_backend(attention, shape), BLOCK_SIZE, CPU)
    entries = [BatchEntry([5] * tokens, context - tokens, table, True) for table in shuffled_tables(sequences, width)]
    return lambda turn: executor.execute(entries, [])


def step_bytes(loaded: LoadedModel, sequences: int, context: int) -> int:
    """What a step must read at least: every weight once (the embedding is the head), and the K/V in float32."""
    if not isinstance(loaded.model, NativeDecoder):
        raise TypeError("the model is not on the CPU kernels")
    c = loaded.config
    kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 4
    return loaded.model.weights_bytes + sequences * context * kv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="for each row of the first table; four times for others"
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 512])
    parser.add_argument("--forms", nargs="+", default=["auto", "float32", "bfloat16"])
    parser.add_argument("--parts", nargs="+", default=["products", "attention", "steps"])
    parser.add_argument("--no-torch", action="store_true", help="steps without torch's, which take long")
    given = parser.parse_args()
    bench = Bench(native.need_library(), given.seconds, clock_for(given.threads))
    torch.set_num_threads(given.threads)
    bench.library.set_threads(given.threads)
    print(machine(bench.library))
    parts: dict[str, Callable[[], None]] = {
        "products": lambda: products(bench, given.rows),
        "attention": lambda: attention(bench, 16, 512),
        "steps": lambda: steps(bench, given.forms, not given.no_torch),
    }
    for part in given.parts:
        meter = LoadMeter()
        parts[part]()
        print(meter.read())


if __name__ == "__main__":
    main()
