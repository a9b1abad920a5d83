"""The CPU kernels: attention over the paged cache, products with packed weights, and whole steps, through ctypes.

library() is None where they were not built; then everything runs in plain torch. OCTAVO_NATIVE=0 turns them off, and
OCTAVO_NATIVE_ISA names an instruction set (scalar, avx2, avx2vnni, avx512, avx512vnni, avx512bf16, neon or neondot) to
use instead of the CPU's best.
All tensors are on the CPU. Calls block, without Python's lock, and one waits for another.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from model_runner.batch import StepBatch

PATH = Path(__file__).parent / "liboctavo.so"
FORMS = ("float32", "bfloat16", "int8", "int4", "int8_channel")
"""How a matrix may be held, in the order of their numbers in the library."""
WHOLE_FORMS = ("int8", "int4", "int8_channel")
"""Those of whole numbers: with a scale for each 32 inputs of an output, or in int8_channel one for each output."""
ACTIVATIONS = ("float32", "int8")
"""What matrices in WHOLE_FORMS are multiplied with: rows as they come, or rounded to 8 bits in groups of 32 inputs, for
products of whole numbers. int8 also lets attention round to bfloat16, where the K/V are and the CPU multiplies it. In
the order of their numbers in the library."""
GROUP = 32
"""Inputs that share a scale in int8 and int4, and in rows that are rounded."""
GATED_BLOCK = 96
"""A model's gates and ups lie by turns in one matrix: so many of the one, then as many of the other."""


class NativeError(RuntimeError):
    """The library refused a call."""


class CBatch(Structure):
    """octavo_batch of octavo.h."""

    _fields_ = (
        ("sequences", c_int64),
        ("query_offsets", c_void_p),
        ("lengths", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
        ("slots", c_void_p),
        ("token_ids", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_logits_rows", c_int64),
        ("logits_rows", c_void_p),
    )


class CCache(Structure):
    """octavo_cache of octavo.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("is_bf16", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
    )


class CLayer(Structure):
    """octavo_layer of octavo.h."""

    _fields_ = tuple(
        (name, c_void_p)
        for name in (
            "input_norm",
            "qkv",
            "qkv_bias",
            "q_norm",
            "k_norm",
            "output",
            "mlp_norm",
            "gate_up",
            "down",
        )
    )


class CModel(Structure):
    """octavo_model of octavo.h."""

    _fields_ = (
        ("layers", c_int64),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("epsilon", c_float),
        ("activations", c_int32),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", c_void_p),
        ("layer", POINTER(CLayer)),
    )


_SIGNATURES: dict[str, tuple[type | None, list]] = {
    "octavo_error": (c_char_p, []),
    "octavo_instruction_sets": (c_char_p, []),
    "octavo_use": (c_int32, [c_char_p]),
    "octavo_set_threads": (c_int32, [c_int32]),
    "octavo_huge_pages": (None, [c_void_p, c_int64]),
    "octavo_probe_multiply_add": (c_int64, [c_int64]),
    "octavo_probe_read": (c_int32, [c_void_p, c_int64]),
    "octavo_matrix_new": (c_void_p, [c_int32, c_int32, c_int64, c_int64]),
    "octavo_matrix_free": (None, [c_void_p]),
    "octavo_matrix_bytes": (c_int64, [c_void_p]),
    "octavo_matrix_fill": (c_int32, [c_void_p, c_int64, c_int64, c_void_p]),
    "octavo_matrix_fill_groups": (c_int32, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
    "octavo_matrix_rows": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "octavo_matrix_multiply": (c_int32, [c_void_p, c_void_p, c_int64, c_void_p]),
    "octavo_attend": (
        c_int32,
        [POINTER(CBatch), POINTER(CCache), c_int64, c_int64, c_float, *[c_void_p] * 4, c_int32],
    ),
    "octavo_model_new": (c_void_p, [POINTER(CModel)]),
    "octavo_model_free": (None, [c_void_p]),
    "octavo_forward": (c_int32, [c_void_p, POINTER(CBatch), POINTER(CCache), c_void_p]),
    "octavo_begin": (c_int32, [c_void_p, POINTER(CBatch)]),
    "octavo_before_attention": (c_int32, [c_void_p, POINTER(CBatch), c_int64, c_void_p]),
    "octavo_after_attention": (c_int32, [c_void_p, POINTER(CBatch), c_int64, c_void_p]),
    "octavo_end": (c_int32, [c_void_p, POINTER(CBatch), c_void_p]),
    "octavo_draw": (c_int32, [c_void_p, c_void_p]),
    "octavo_logprobs": (c_int32, [c_void_p, c_void_p, c_void_p, c_void_p]),
}


class Library:
    """The loaded library. call() makes one call of octavo.h."""

    def __init__(self, path: Path) -> None:
        """Raises OSError for a file that is missing or not for this machine, NativeError for one of another version."""
        self._functions = {}
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            if not hasattr(loaded, name):
                raise NativeError(f"{path} has no {name}: it was built from other sources")
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function
        self.instruction_set = ""
        self.use(os.environ.get("OCTAVO_NATIVE_ISA") or self.instruction_sets[0])
        self.set_threads(torch.get_num_threads())

    @property
    def instruction_sets(self) -> list[str]:
        """Those that this CPU has, best first."""
        return self._functions["octavo_instruction_sets"]().decode().split(",")

    def use(self, instruction_set: str) -> None:
        """Matrices and models made from now on use it, and attend(). Raises NativeError where there is none such."""
        self.call("octavo_use", instruction_set.encode())
        self.instruction_set = instruction_set

    def set_threads(self, threads: int) -> None:
        """How many threads compute, the caller's included; results are the same, bit by bit, with any number."""
        self.call("octavo_set_threads", threads)
        self.threads = threads

    def call(self, name: str, *arguments: object) -> int:
        """Raises NativeError with the library's sentence when the call fails."""
        done = self._functions[name](*arguments)
        if done is None or done < 0:
            raise NativeError(self._functions["octavo_error"]().decode())
        return done

    def run(self, name: str, *arguments: object) -> None:
        """A call that gives nothing back and cannot fail."""
        self._functions[name](*arguments)


@cache
def _loaded() -> Library | str:
    """The library, or why there is none."""
    if os.environ.get("OCTAVO_NATIVE") == "0":
        return "OCTAVO_NATIVE=0 turns the CPU kernels off"
    if not PATH.exists():
        return "the CPU kernels were not built: there was no C++ compiler when Octavo was installed"
    try:
        return Library(PATH)
    except (OSError, NativeError) as error:
        return f"the CPU kernels cannot be used: {error}"


def library() -> Library | None:
    """The library, loaded once, or None."""
    loaded = _loaded()
    return loaded if isinstance(loaded, Library) else None


def why_not() -> str | None:
    """Why library() is None, in a sentence without a full stop; None when it is there."""
    loaded = _loaded()
    return loaded if isinstance(loaded, str) else None


def need_library() -> Library:
    """Raises NativeError where there is none."""
    loaded = _loaded()
    if isinstance(loaded, str):
        raise NativeError(loaded)
    return loaded


class Matrix:
    """Weights [outputs, inputs], packed once into memory of the library's own; 0 until they are filled."""

    def __init__(self, form: str, outputs: int, inputs: int, activations: str = "float32") -> None:
        """form: one of FORMS; inputs must be even for bfloat16 and a multiple of 32 for WHOLE_FORMS.

        activations: one of ACTIVATIONS. int8 concerns WHOLE_FORMS; with others rows stay in float32.
        """
        self._library = need_library()
        self.form, self.shape = form, (outputs, inputs)
        self.handle = self._library.call(
            "octavo_matrix_new", FORMS.index(form), ACTIVATIONS.index(activations), outputs, inputs
        )

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.run("octavo_matrix_free", self.handle)

    @property
    def bytes(self) -> int:
        return self._library.call("octavo_matrix_bytes", self.handle)

    def fill(self, first: int, weights: Tensor) -> None:
        """Rounds floating-point rows [count, inputs] to the form, for the outputs from `first` on."""
        count = self._count(weights)
        rows = weights.to(torch.float32).contiguous()
        self._library.call("octavo_matrix_fill", self.handle, first, count, rows.data_ptr())

    def fill_groups(self, first: int, numbers: Tensor, scales: Tensor, offsets: Tensor | None) -> None:
        """Takes rows of an int8 or int4 matrix over as they are: weight = scale x number + offset.

        numbers: int8 [count, inputs], in int4 from 0 to 15. scales: float16 [count, inputs / 32], one for each 32
        inputs; offsets likewise in int4, None in int8.
        """
        count = self._count(numbers)
        groups = (count, self.shape[1] // GROUP)
        for each in (scales, *([] if offsets is None else [offsets])):
            if tuple(each.shape) != groups or each.dtype != torch.float16:
                raise NativeError(f"scales and offsets are float16 {list(groups)}, not {each.dtype} {list(each.shape)}")
        if numbers.dtype != torch.int8:
            raise NativeError(f"numbers are int8, not {numbers.dtype}")
        numbers, scales = numbers.contiguous(), scales.contiguous()
        offsets = None if offsets is None else offsets.contiguous()
        self._library.call(
            "octavo_matrix_fill_groups",
            self.handle,
            first,
            count,
            numbers.data_ptr(),
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
        )

    def rows(self, outputs: Tensor) -> Tensor:
        """float32 [count, inputs]: the weights of some outputs (int64 [count]), as the products use them."""
        chosen = outputs.to(torch.int64).contiguous()
        to = torch.empty(len(chosen), self.shape[1])
        self._library.call("octavo_matrix_rows", self.handle, chosen.data_ptr(), len(chosen), to.data_ptr())
        return to

    def multiply(self, x: Tensor) -> Tensor:
        """x: float32 [rows, inputs]. float32 [rows, outputs]; a row's result depends on that row alone."""
        rows = _floats(x, (len(x), self.shape[1]))
        y = torch.empty(len(rows), self.shape[0])
        self._library.call("octavo_matrix_multiply", self.handle, rows.data_ptr(), len(rows), y.data_ptr())
        return y

    def _count(self, rows: Tensor) -> int:
        if rows.dim() != 2 or rows.shape[1] != self.shape[1]:
            raise NativeError(f"rows of {self.shape[1]} weights are wanted, not {list(rows.shape)}")
        return len(rows)


def zeros(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in huge pages, where the system has them: for what is read from end to end, again and again."""
    memory = torch.empty(*size, dtype=dtype)
    need_library().run("octavo_huge_pages", memory.data_ptr(), memory.nbytes)
    return memory.zero_()


def key_pair(dtype: torch.dtype) -> int:
    """Numbers of a key that lie together: as many as 4 bytes hold."""
    return 4 // dtype.itemsize


def c_cache(keys: Tensor, values: Tensor, window: int | None) -> CCache:
    """The cache as the library sees it, float32 or bfloat16.

    keys: [layers, blocks, kv heads, head_dim / pair, block_size, pair], where pair is that of key_pair().
    values: [layers, blocks, kv heads, block_size, head_dim].
    """
    if values.dtype not in (torch.float32, torch.bfloat16) or keys.dtype != values.dtype:
        raise NativeError("keys and values are both float32 or both bfloat16")
    layers, num_blocks, kv_heads, block_size, head_dim = values.shape
    pair = key_pair(keys.dtype)
    fits = tuple(keys.shape) == (layers, num_blocks, kv_heads, head_dim // pair, block_size, pair)
    if not fits or head_dim % pair or not keys.is_contiguous() or not values.is_contiguous():
        raise NativeError("keys and values are contiguous and of fitting shapes")
    if block_size & (block_size - 1):
        raise NativeError(f"blocks of {block_size} tokens are not supported; powers of two are")
    is_bf16 = keys.dtype == torch.bfloat16
    return CCache(keys.data_ptr(), values.data_ptr(), is_bf16, block_size, num_blocks, kv_heads, head_dim, window or 0)


def c_batch(batch: StepBatch, cos: Tensor | None = None, sin: Tensor | None = None) -> CBatch:
    """The step as the library sees it; the tensors must outlive it. cos, sin: float32 [T, head_dim / 2], for models."""
    rotations = (None, None) if cos is None or sin is None else (cos.data_ptr(), sin.data_ptr())
    return CBatch(
        len(batch.lengths),
        batch.query_offsets.data_ptr(),
        batch.sequence_lengths.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.shape[1],
        batch.slot_mapping.data_ptr(),
        batch.token_ids.data_ptr(),
        *rotations,
        len(batch.logits_rows),
        batch.logits_rows.data_ptr(),
    )


def attend(
    batch: CBatch,
    cached: CCache,
    layer: int,
    scale: float,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    activations: str = "float32",
) -> Tensor:
    """Writes a step's K/V to one layer's slots, then attends: float32 [T, heads, head_dim], as the queries are.

    queries: [T, heads, head_dim]; keys, values: [T, kv heads, head_dim]; any floating-point dtype. activations: one of
    ACTIVATIONS; with int8, queries and weights are rounded to bfloat16 where the cache is, if the CPU multiplies that.
    """
    num_tokens, heads, _ = queries.shape
    kv_shape = (num_tokens, cached.kv_heads, cached.head_dim)
    rows = _floats(queries, (num_tokens, heads, cached.head_dim))
    new_keys, new_values = _floats(keys, kv_shape), _floats(values, kv_shape)
    output = torch.empty_like(rows)
    need_library().call(
        "octavo_attend",
        byref(batch),
        byref(cached),
        layer,
        heads,
        scale,
        *(each.data_ptr() for each in (rows, new_keys, new_values, output)),
        ACTIVATIONS.index(activations),
    )
    return output


def _floats(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise NativeError(f"a tensor of shape {list(shape)} is wanted, not {list(tensor.shape)}")
    return tensor.to(torch.float32).contiguous()
