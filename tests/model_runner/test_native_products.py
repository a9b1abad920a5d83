"""Products with packed weights: right within float32 in every form, and a row's result its own affair, bit by bit."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_runner.native import FORMS, GROUP, WHOLE_FORMS, Matrix, NativeError
from model_runner.weights import Grouped
from tests.model_runner.native_support import INSTRUCTION_SETS, using

pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="the CPU kernels are not built")

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 16, 17, 64, 256, 257, 300]
"""Both sides of every border between ways to compute: pairs of panels, blocks of rows, decoding once, units of rows."""

SHAPES = [(1, 32), (7, 64), (48, 96), (96, 32), (145, 352)]
"""One output, less than a panel, whole panels, and a part of one; 352 inputs are decoded in three parts."""


def drawn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def filled(form: str, outputs: int, inputs: int) -> Matrix:
    matrix = Matrix(form, outputs, inputs)
    matrix.fill(0, drawn(outputs, inputs, seed=1))
    return matrix


def held(matrix: Matrix) -> Tensor:
    return matrix.rows(torch.arange(matrix.shape[0]))


class TestRight:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_products_are_those_of_float64(self, instruction_set: str, form: str, shape: tuple[int, int]) -> None:
        with using(instruction_set):
            matrix = filled(form, *shape)
        weights = held(matrix).double()
        for rows in ROWS:
            x = drawn(rows, shape[1], seed=rows)
            expected = x.double() @ weights.T
            bound = 1e-6 * (x.double().abs() @ weights.abs().T)
            assert ((matrix.multiply(x) - expected).abs() <= bound).all()

    @pytest.mark.parametrize("inputs", [1, 3, 33, 161, 300, 353])
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_float32_takes_any_number_of_inputs(self, instruction_set: str, inputs: int) -> None:
        with using(instruction_set):
            matrix = filled("float32", 5, inputs)
        for rows in (9, 40):
            x = drawn(rows, inputs)
            expected = x.double() @ drawn(5, inputs, seed=1).double().T
            torch.testing.assert_close(matrix.multiply(x).double(), expected, atol=1e-4, rtol=0)

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_a_vast_weight_reaches_its_own_output_only(self, instruction_set: str, form: str) -> None:
        weights = torch.zeros(100, 64)
        weights[60, 33] = 1e4
        with using(instruction_set):
            matrix = Matrix(form, 100, 64)
        matrix.fill(0, weights)
        for rows in (1, 2, 8, 40):
            y = matrix.multiply(torch.ones(rows, 64))
            assert (y[:, 60] - 1e4).abs().max() <= 80
            y[:, 60] = 0
            assert y.count_nonzero() == 0


class TestForms:
    def test_float32_is_what_it_was_given(self) -> None:
        assert torch.equal(held(filled("float32", 50, 33)), drawn(50, 33, seed=1))

    def test_bfloat16_rounds_as_torch_does(self) -> None:
        assert torch.equal(held(filled("bfloat16", 50, 34)), drawn(50, 34, seed=1).bfloat16().float())

    @pytest.mark.parametrize(("form", "steps"), [("int8", 127), ("int4", 15)])
    def test_whole_numbers_are_off_by_half_a_step(self, form: str, steps: int) -> None:
        weights = drawn(50, 96, seed=1)
        groups = weights.view(50, 3, GROUP)
        least, greatest = groups.amin(-1), groups.amax(-1)
        span = greatest - least if form == "int4" else torch.maximum(-least, greatest)
        error = (held(filled(form, 50, 96)).view_as(groups) - groups).abs().amax(-1)
        # Scales and offsets are half precision: 11 bits.
        assert (error <= 0.5 * span / steps + span / 1024 + groups.abs().amax(-1) / 2048).all()

    def test_one_scale_for_each_output(self) -> None:
        weights = drawn(50, 96, seed=1)
        scales = weights.abs().amax(dim=1, keepdim=True) / 127
        assert torch.equal(held(filled("int8_channel", 50, 96)), (weights / scales).round() * scales)

    @pytest.mark.parametrize("form", WHOLE_FORMS)
    def test_groups_of_equal_weights(self, form: str) -> None:
        matrix = Matrix(form, 2, 64)
        matrix.fill(0, torch.cat([torch.zeros(1, 64), torch.full((1, 64), 0.5)]))
        torch.testing.assert_close(held(matrix), torch.tensor([[0.0], [0.5]]).expand(2, 64), atol=1e-3, rtol=0)

    @pytest.mark.parametrize("form", ["int8", "int4"])
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_stored_groups_give_the_bits_of_their_float32_values(self, instruction_set: str, form: str) -> None:
        """What `auto` stands on: weights kept as the file has them, and nothing of the result changed."""
        grouped = some_groups(form, 70, 160)
        with using(instruction_set):
            packed, plain = Matrix(form, 70, 160), Matrix("float32", 70, 160)
        packed.fill_groups(0, grouped.numbers, grouped.scales, grouped.offsets)
        plain.fill(0, grouped.dequantized())
        assert torch.equal(held(packed), grouped.dequantized())
        for rows in ROWS:
            x = drawn(rows, 160, seed=rows)
            assert torch.equal(packed.multiply(x), plain.multiply(x))

    @pytest.mark.parametrize("form", FORMS)
    def test_filled_in_parts(self, form: str) -> None:
        whole, parts = filled(form, 70, 64), Matrix(form, 70, 64)
        weights = drawn(70, 64, seed=1)
        for first, last in ((0, 1), (1, 50), (50, 70)):
            parts.fill(first, weights[first:last])
        assert torch.equal(held(parts), held(whole))

    def test_bytes(self) -> None:
        """Per weight: 4, 2, 1 + 2/32, 1/2 + 4/32 and, with 4 more for each output, 1 byte."""
        outputs, inputs = 480, 320
        sizes = [Matrix(form, outputs, inputs).bytes * 8 / (outputs * inputs) for form in FORMS]
        assert sizes == [32, 16, 8.5, 5, 8 + 32 / inputs]


def some_groups(form: str, outputs: int, inputs: int) -> Grouped:
    """In int8_channel all inputs of an output are one group, whose largest number is 127 or -127."""
    draw = torch.Generator().manual_seed(2)
    least, greatest = {"int4": (0, 16), "int8": (-128, 128), "int8_channel": (-127, 128)}[form]
    numbers = torch.randint(least, greatest, (outputs, inputs), generator=draw, dtype=torch.int8)
    scales, offsets = (torch.randn(outputs, inputs // GROUP, generator=draw).half() for _ in range(2))
    if form == "int8_channel":
        scales = scales[:, :1].abs()
        numbers[:, 7] = torch.where(numbers[:, 7] < 0, -127, 127)
    # Half-precision numbers below the normal ones, and both zeros.
    small = torch.tensor([6e-8, 0.0, -0.0])[: scales.shape[1]]
    scales[0, : len(small)] = small
    return Grouped(form, numbers, scales, offsets if form == "int4" else None)


class TestMemory:
    def test_new_matrices_are_zero_whatever_was_there(self) -> None:
        filled("float32", 480, 320)
        assert held(Matrix("float32", 480, 320)).count_nonzero() == 0

    def test_neighbours_do_not_share_weights(self) -> None:
        matrices = [Matrix("int8", 7, 32) for _ in range(50)]
        for number, matrix in enumerate(matrices):
            matrix.fill(0, torch.full((7, 32), float(number)))
        for number, matrix in enumerate(matrices):
            torch.testing.assert_close(held(matrix), torch.full((7, 32), float(number)), atol=0.05, rtol=0)

    @pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident size is read from /proc")
    def test_it_goes_back_when_all_matrices_are_gone(self) -> None:
        """64 matrices of 1 MiB: small ones share memory, and one that stays keeps its own part alive."""
        before = resident_mib()
        matrices = [filled("float32", 512, 512) for _ in range(64)]
        assert resident_mib() - before > 60
        last = matrices[-1]
        del matrices
        assert resident_mib() - before < 40
        assert torch.equal(held(last), drawn(512, 512, seed=1))


def resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class TestInvariance:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
    def test_a_row_is_the_same_bits_in_any_batch(self, instruction_set: str, form: str) -> None:
        with using(instruction_set):
            matrix = filled(form, 145, 288)
        x = drawn(255, 288)
        whole = matrix.multiply(x)
        for rows in ROWS:
            for first in (0, 1, 100, 255 - rows):
                assert torch.equal(matrix.multiply(x[first : first + rows]), whole[first : first + rows])

    @pytest.mark.parametrize("form", FORMS)
    def test_threads_do_not_change_a_bit(self, form: str) -> None:
        matrix = filled(form, 1000, 288)
        x = drawn(200, 288)
        results = []
        for threads in (1, 2, 3, 7):
            with using(threads=threads):
                results += [torch.cat([matrix.multiply(x[:1]), matrix.multiply(x)])]
        assert all(torch.equal(each, results[0]) for each in results)

    def test_instruction_sets_agree(self) -> None:
        x = drawn(5, 288)
        results = []
        for instruction_set in INSTRUCTION_SETS:
            with using(instruction_set):
                results.append(filled("float32", 70, 288).multiply(x))
        for each in results:
            torch.testing.assert_close(each, results[0], atol=1e-4, rtol=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(("form", "inputs"), [("bfloat16", 33), ("int8", 48), ("int4", 16), ("int8_channel", 8)])
    def test_inputs_that_a_form_cannot_hold(self, form: str, inputs: int) -> None:
        with pytest.raises(NativeError, match=f"{inputs} inputs"):
            Matrix(form, 4, inputs)

    def test_outputs_that_are_not_there(self) -> None:
        matrix = Matrix("float32", 4, 8)
        with pytest.raises(NativeError, match="no such outputs"):
            matrix.fill(3, torch.zeros(2, 8))
        for output in (-1, 4):
            with pytest.raises(NativeError, match="no such outputs"):
                matrix.rows(torch.tensor([output]))

    def test_wrong_shapes_and_types(self) -> None:
        matrix = Matrix("int4", 4, 64)
        numbers, halves = torch.zeros(4, 64, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.float16)
        with pytest.raises(NativeError, match=r"\[3, 64\] is wanted"):
            matrix.multiply(torch.zeros(3, 32))
        with pytest.raises(NativeError, match="rows of 64 weights"):
            matrix.fill(0, torch.zeros(4, 32))
        with pytest.raises(NativeError, match=r"float16 \[4, 2\]"):
            matrix.fill_groups(0, numbers, halves[:, :1], halves)
        with pytest.raises(NativeError, match="int8, not"):
            matrix.fill_groups(0, numbers.int(), halves, halves)
        with pytest.raises(NativeError, match="offsets"):
            matrix.fill_groups(0, numbers, halves, None)
        with pytest.raises(NativeError, match="offsets"):
            Matrix("float32", 4, 64).fill_groups(0, numbers, halves, None)
        with pytest.raises(NativeError, match="offsets"):
            Matrix("int8_channel", 4, 64).fill_groups(0, numbers, halves, None)

    def test_an_instruction_set_that_is_not_there(self) -> None:
        with pytest.raises(NativeError, match=r"no instruction set 'mmx'; it has .*(scalar|neon)"), using("mmx"):
            pass

    def test_no_threads(self) -> None:
        with pytest.raises(NativeError, match="must be a thread"), using(threads=-1):
            pass
