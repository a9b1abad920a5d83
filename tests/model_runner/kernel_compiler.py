"""Compiles the launches that the triton backend makes for GPUs that are not there, and prints a JSON line for each.

Run as a program, without TRITON_INTERPRET. What the tests of the interpreter can't see shows here: types that a GPU's
compiler refuses, and more shared memory than a GPU has.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model_runner.attention import AttentionShape
from model_runner.attention import triton_kernels as kernels
from model_runner.attention.triton import TritonAttention
from model_runner.batch import BatchEntry, pack_batch
from model_runner.books import CopyOrder
from model_runner.kv_scales import KvScales

BLOCK = 16
CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
LLAMA = AttentionShape(2, 32, 8, 128, BLOCK, 40, torch.bfloat16, CPU, query_dtype=torch.bfloat16)
GEMMA = replace(LLAMA, num_heads=16, num_kv_heads=2, head_dim=256, sliding_window=64, logits_soft_cap=50.0)
SMOLLM = replace(LLAMA, num_heads=9, num_kv_heads=3, head_dim=64, kv_dtype=FP8, scales=KvScales((0.5,), (0.3,)))
FLOAT = AttentionShape(1, 5, 1, 80, BLOCK, 40, torch.float32, CPU)
TARGETS = [(80, LLAMA), (90, SMOLLM), (80, GEMMA), (100, LLAMA), (80, FLOAT)]
"""Compute capabilities, each with a shape."""
LAUNCHED = ("attend", "merge", "write", "copy_blocks")


class Recorder:
    """In the kernels' place: keeps what they are launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(kernels, name)
        return _Launcher(self, function) if name in LAUNCHED else function


class _Launcher:
    def __init__(self, recorder: Recorder, function: Any) -> None:
        self._recorder, self._function = recorder, function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self._recorder.launches.append((self._function, arguments, constants))

        return launch


def launches_of(shape: AttentionShape) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Those of a copy and of a step with a prompt and a token after 600 others, which has more than one part."""
    backend = TritonAttention(replace(shape, num_layers=1))
    recorder = Recorder()
    backend._kernels = recorder
    backend.copy_blocks([CopyOrder(1, 2, 5)])
    table = list(range(1, 39))
    backend.plan(pack_batch([BatchEntry([0], 600, table, True), BatchEntry([0] * 3, 0, table, True)], BLOCK, CPU))
    rows = (torch.zeros(4, heads, shape.head_dim, dtype=shape.query_dtype) for heads in _heads(shape))
    backend.run(0, *rows)
    return recorder.launches


def _heads(shape: AttentionShape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.num_kv_heads


def compiled(function: Any, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int) -> Any:
    """The launch's kernel for a GPU of that capability."""
    options = {name: value for name, value in constants.items() if name not in function.arg_names}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    names = [name for name in function.arg_names if name not in constants]
    types = {name: _type_of(value) for name, value in zip(names, arguments, strict=True)}
    signature = {name: types.get(name, "constexpr") for name in function.arg_names}
    source = ASTSource(function, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _type_of(value: Tensor | int | float) -> str:
    if isinstance(value, Tensor):
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8e4nv"}
        return "*" + (names | {torch.int32: "i32", torch.int64: "i64"})[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"


def offsets_into_8_bits(program: str) -> list[str]:
    """Types of the numbers that are added to pointers to 8 bits, which only K/V has: 'i64', as a rule."""
    found = re.findall(r"tt\.addptr [^\n]*?: [^\n,]*ptr<f8E4M3FN>>?, (?:tensor<[\dx]*?)?(i\d+)", program)
    return list(found)


def main() -> None:
    for capability, shape in TARGETS:
        for function, arguments, constants in launches_of(shape):
            kernel = compiled(function, arguments, constants, capability)
            fact = {"capability": capability, "kernel": function.__name__, "shared": kernel.metadata.shared}
            fact["offsets"] = offsets_into_8_bits(kernel.asm["ttir"])
            print(json.dumps({**fact, "bytes": len(kernel.asm["cubin"])}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
