"""Which attention backend is chosen, what is said of the others, and how broken kernels are found before they serve."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from model_runner.attention import BACKENDS, AttentionBackend, AttentionShape, choose, create_backend, order_of
from model_runner.attention import choice as choice_module
from model_runner.attention import flashinfer as flashinfer_backend
from model_runner.attention.flash_attn import FlashAttention
from model_runner.attention.flashinfer import FlashInferAttention
from model_runner.attention.nhd import GpuAttention
from model_runner.attention.reference import ReferenceAttention
from model_runner.attention.trial import why_broken
from model_runner.attention.triton import TritonAttention
from model_runner.batch import StepBatch
from model_runner.kv_scales import KvScales
from tests.model_runner import gpu_doubles
from tests.model_runner.attention_world import CPU

CUDA = torch.device("cuda")
HALF = torch.float16
SHAPE = AttentionShape(2, 4, 2, 64, 16, 9, HALF, CPU, query_dtype=HALF)


class Kernels(ReferenceAttention, GpuAttention):
    """Kernels for a GPU that are right."""

    name = "right"


class Raising(Kernels):
    name = "raising"

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise OSError("libcuda.so.1: cannot open\nand more lines")


class Wrong(Kernels):
    """Sees a key less than it should."""

    name = "wrong"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(replace(shape, sliding_window=7))


class NotANumber(Kernels):
    name = "nan"

    def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return super().run(layer, queries, keys, values) * float("nan")


class Unwritten(Kernels):
    """Right in the first step, and forgets the K/V."""

    name = "unwritten"

    def plan(self, batch: Any) -> None:
        super().plan(batch)
        self.keys.zero_()


class Absent(Kernels):
    name = "absent"
    made: ClassVar[int] = 0

    def __init__(self, shape: AttentionShape) -> None:
        raise AssertionError("it can't be had")

    @classmethod
    def why_not_here(cls, device: torch.device) -> str | None:
        return f"there is none on {device}"


class TestOrder:
    def test_auto(self) -> None:
        assert [each.name for each in order_of("auto", CPU)] == ["cpu", "cpu_torch", "reference"]
        assert [each.name for each in order_of("auto", CUDA)] == ["flashinfer", "flash_attn", "triton", "reference"]

    def test_a_name_comes_before_the_device_s_own(self) -> None:
        assert [each.name for each in order_of("cpu_torch", CPU)] == ["cpu_torch", "cpu", "reference"]
        names = [each.name for each in order_of("triton", CUDA)]
        assert names == ["triton", "flashinfer", "flash_attn", "reference"]

    @pytest.mark.parametrize("name", ["flash", "CPU", ""])
    def test_an_unknown_name_is_refused_with_the_choices(self, name: str) -> None:
        with pytest.raises(ValueError, match="attention backend") as raised:
            order_of(name, CPU)
        for choice in (repr(name), "auto", *BACKENDS):
            assert choice in str(raised.value)


class TestChoice:
    def test_the_first_that_can(self) -> None:
        choice = choose([Kernels, ReferenceAttention], SHAPE)
        assert choice.backend.name == "right"
        assert choice.backend.keys.shape == (2, 9, 16, 2, 64)
        assert choice.describe() == "right (before reference)"

    def test_what_is_against_the_others(self) -> None:
        choice = choose([Absent, Raising, ReferenceAttention, Kernels], SHAPE)
        assert choice.describe() == (
            "reference (not absent: there is none on cpu; "
            "not raising: its trial failed: OSError: libcuda.so.1: cannot open; before right)"
        )

    def test_each_backend_of_a_gpu_is_in_the_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where nothing but our own kernels can be had, and they are right."""
        monkeypatch.setattr(FlashInferAttention, "why_not", lambda shape: "it is not installed")
        monkeypatch.setattr(FlashAttention, "why_not", lambda shape: "FlashAttention 3 is not installed")
        monkeypatch.setattr(TritonAttention, "why_not", lambda shape: None)
        monkeypatch.setattr(choice_module, "why_broken", lambda candidate, shape: None)
        monkeypatch.setattr(TritonAttention, "__init__", ReferenceAttention.__init__)
        line = choose(order_of("auto", CUDA), SHAPE).describe()
        assert line == (
            "triton (not flashinfer: it is not installed; not flash_attn: FlashAttention 3 is not installed; "
            "before reference)"
        )
        named = choose(order_of("triton", CUDA), SHAPE).describe()
        assert named == "triton (before flashinfer, flash_attn, reference)"

    def test_a_named_one_that_cannot_be_had_here(self) -> None:
        choice = choose(order_of("flashinfer", CPU), replace(SHAPE, kv_dtype=torch.float32))
        assert choice.backend.name in ("cpu", "cpu_torch")
        assert ("flashinfer", "the device is cpu, and it needs CUDA") in choice.refused

    def test_kernels_that_do_not_know_the_cache(self) -> None:
        assert create_backend("cpu", SHAPE).name == "cpu_torch"

    def test_too_little_memory_is_no_reason_to_go_on(self) -> None:
        def none_left(self: object, shape: AttentionShape) -> None:
            if shape.num_blocks == 9:
                raise torch.OutOfMemoryError("CUDA out of memory")
            GpuAttention.__init__(self, shape)

        with mock.patch.object(Kernels, "__init__", none_left), pytest.raises(torch.OutOfMemoryError):
            choose([Kernels, ReferenceAttention], SHAPE)


def flashinfer_double(shape: AttentionShape) -> AttentionBackend:
    return FlashInferAttention(shape, gpu_doubles.flashinfer, workspace_bytes=16)


class TestTrial:
    @pytest.mark.parametrize("make", [Kernels, flashinfer_double])
    @pytest.mark.parametrize("window", [None, 7])
    def test_right_kernels(self, make: Callable[[AttentionShape], AttentionBackend], window: int | None) -> None:
        assert why_broken(make, replace(SHAPE, sliding_window=window)) is None

    @pytest.mark.parametrize(("make", "reason"), [(Wrong, "off by"), (NotANumber, "off by nan"), (Unwritten, "off by")])
    def test_wrong_results(self, make: type[Kernels], reason: str) -> None:
        assert reason in (why_broken(make, SHAPE) or "")

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scales_of_a_model_hide_nothing(self, scale: float) -> None:
        """By these the numbers of a trial would all become the largest, or all 0."""
        scales = KvScales((scale, scale), (scale, scale))
        shape = replace(SHAPE, kv_dtype=torch.float8_e4m3fn, scales=scales)
        assert [why_broken(make, shape) for make in (Kernels, flashinfer_double)] == [None, None]
        assert "off by" in (why_broken(Wrong, shape) or "")

    @pytest.mark.parametrize("group", range(1, 9))
    def test_every_group(self, group: int) -> None:
        assert why_broken(flashinfer_double, replace(SHAPE, num_heads=group, num_kv_heads=1)) is None

    def test_a_small_cache_is_enough(self) -> None:
        """The trial comes before the memory is given away."""
        shapes = []

        def make(shape: AttentionShape) -> AttentionBackend:
            shapes.append(shape)
            return Kernels(shape)

        assert why_broken(make, replace(SHAPE, num_layers=80, num_blocks=1 << 40)) is None
        (shape,) = shapes
        # Six, and as many as 96 tokens take.
        assert (shape.num_layers, shape.num_blocks) == (1, 12)

    @pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
    def test_all_that_flashinfer_compiles_is_compiled(self, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its decode, its prefill for up to 64 tokens and for more, and its merge of two parts."""
        planned, merged = [], []

        class Prefill(gpu_doubles.flashinfer.BatchPrefillWithPagedKVCacheWrapper):
            def plan(self, qo_indptr: Tensor, *args: Any, **options: Any) -> None:
                planned.append(int(qo_indptr.diff().max()))
                super().plan(qo_indptr, *args, **options)

        def merge(*args: Tensor) -> Any:
            merged.append(args)
            return merge_state(*args)

        merge_state = gpu_doubles.flashinfer.merge_state
        monkeypatch.setattr(gpu_doubles.flashinfer, "BatchPrefillWithPagedKVCacheWrapper", Prefill)
        monkeypatch.setattr(gpu_doubles.flashinfer, "merge_state", merge)
        assert why_broken(flashinfer_double, replace(SHAPE, block_size=size)) is None
        assert {count > 64 for count in planned} == {False, True}
        assert merged

    @pytest.mark.parametrize("is_wrong", [lambda rows: len(rows) > 64, lambda rows: len(rows) == 4])
    def test_what_is_wrong_only_there_is_found(self, is_wrong: Callable[[Tensor], bool]) -> None:
        """Long prompts, and single tokens that share much."""

        class WrongThere(Kernels):
            def run(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
                return super().run(layer, queries, keys, values) + is_wrong(queries)

        assert "off by" in (why_broken(WrongThere, SHAPE) or "")

    def test_a_missing_compiler_is_a_reason(self) -> None:
        """What FlashInfer says without one, which is not before its first plan."""

        class NoCompiler(Kernels):
            name = "flashinfer"

            def plan(self, batch: StepBatch) -> None:
                raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")

        assert choose([NoCompiler, ReferenceAttention], SHAPE).describe() == (
            "reference (not flashinfer: its trial failed: RuntimeError: Could not find nvcc and default "
            "cuda_home='/usr/local/cuda' doesn't exist)"
        )


class TestABrokenFlashInfer:
    @pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError, AssertionError])
    def test_whatever_its_import_raises_is_a_reason(self, error: type[Exception]) -> None:
        flashinfer_backend._import_error.cache_clear()
        with (
            mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
            mock.patch("importlib.util.find_spec", return_value=object()),
            mock.patch("importlib.import_module", side_effect=error("no cutlass")),
        ):
            reason = FlashInferAttention.why_not_here(CUDA)
        flashinfer_backend._import_error.cache_clear()
        assert reason == f"its import failed: {error.__name__}: no cutlass"

    def test_nobody_imports_it_but_its_backend(self, tmp_path: Path) -> None:
        """Its import takes seconds: what a start loads does without, and so does a device that has no use for it."""
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer" / "__init__.py").write_text("raise SystemExit('flashinfer is imported')")
        program = (
            "import torch, services.runner_process\n"
            "from model_runner.attention import BACKENDS\n"
            "from model_runner.sampling_choice import choose_sampler\n"
            "print(BACKENDS['flashinfer'].why_not_here(torch.device('cpu')))\n"
            "print(choose_sampler(torch.device('cpu'), 50).line)\n"
        )
        path = os.pathsep.join([str(tmp_path), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "the device is cpu, and it needs CUDA",
            "octavo's own (not flashinfer: the device is cpu, and it needs CUDA)",
        ]

    def test_it_is_not_imported_where_it_is_not_installed(self) -> None:
        with (
            mock.patch("importlib.util.find_spec", return_value=None),
            mock.patch("importlib.import_module", side_effect=AssertionError),
        ):
            assert FlashInferAttention.why_not_here(CUDA) == "it is not installed (pip install 'octavo[gpu]')"

    @pytest.mark.parametrize(("has", "reason"), [((7, 0), "the GPU is sm70, below sm75"), ((7, 5), None)])
    def test_old_gpus(self, has: tuple[int, int], reason: str | None) -> None:
        with (
            mock.patch("torch.cuda.get_device_capability", return_value=has),
            mock.patch("importlib.util.find_spec", return_value=object()),
            mock.patch.object(flashinfer_backend, "_import_error", return_value=None),
        ):
            assert FlashInferAttention.why_not_here(CUDA) == reason
