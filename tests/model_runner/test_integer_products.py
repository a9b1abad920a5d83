"""Products with rows rounded to 8 bits: the bits of a plain model of the arithmetic, in any batch, on every CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model_runner.native import GROUP, WHOLE_FORMS, Matrix
from model_runner.weights import Grouped
from tests.model_runner.native_support import INTEGER_SETS, using
from tests.model_runner.test_native_products import ROWS, SHAPES, drawn, held, some_groups

pytestmark = pytest.mark.skipif(not INTEGER_SETS, reason="the CPU kernels are not built")

Floats = NDArray[np.float32]


def packed(grouped: Grouped, activations: str = "int8") -> Matrix:
    """With the numbers of `grouped`. Half-precision scales times 127 are exact in float32, so fill() finds them."""
    matrix = Matrix(grouped.form, *grouped.numbers.shape, activations)
    if grouped.form == "int8_channel":
        matrix.fill(0, grouped.dequantized())
    else:
        matrix.fill_groups(0, grouped.numbers, grouped.scales, grouped.offsets)
    return matrix


def rounded(x: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Whole numbers [rows, groups, 32] from -127 to 127, and scales [rows, groups]."""
    groups = x.reshape(len(x), -1, GROUP)
    top = np.abs(groups).max(axis=-1)
    steps = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top >= np.float32(1e-30))
    return np.rint(groups * steps[..., None]).astype(np.int64), top / np.float32(127)


def multiply_add(a: Floats, b: Floats, c: Floats, fused: bool) -> Floats:
    """a x b + c in float32, rounded once or after the product too. Products of these numbers are exact in float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32) if fused else a * b + c


def modelled(x: Tensor, grouped: Grouped, fused: bool) -> Tensor:
    """What the product must be, bit by bit: exact sums of whole numbers, and one chain over groups in float32, which is
    multiplied at its end by a scale that all groups share."""
    numbers, scales = rounded(x.numpy())
    groups = numbers.shape[1]
    weights = grouped.numbers.numpy().reshape(-1, groups, GROUP).astype(np.int64)
    weight_scales = grouped.scales.float().numpy()
    y = np.zeros((len(x), len(weights)), dtype=np.float32)
    is_channel = grouped.form == "int8_channel"
    for group in range(groups):
        sums = (numbers[:, group] @ weights[:, group].T).astype(np.float32)
        of_weights = np.float32(1) if is_channel else weight_scales[:, group]
        y = multiply_add(sums, scales[:, group, None] * of_weights, y, fused)
        if grouped.offsets is not None:
            row_sums = scales[:, group] * numbers[:, group].sum(axis=-1).astype(np.float32)
            y = multiply_add(row_sums[:, None], grouped.offsets.float().numpy()[:, group], y, fused)
    return torch.from_numpy(y * weight_scales[:, 0] if is_channel else y)


@pytest.mark.parametrize("form", WHOLE_FORMS)
@pytest.mark.parametrize("instruction_set", INTEGER_SETS)
class TestRight:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_bits_of_the_model(self, instruction_set: str, form: str, shape: tuple[int, int]) -> None:
        grouped = some_groups(form, *shape)
        with using(instruction_set):
            matrix = packed(grouped)
        for rows in ROWS:
            x = drawn(rows, shape[1], seed=rows)
            x[0, :GROUP] = 0
            x[rows // 2, :GROUP] *= 1e-35
            x[-1, -GROUP:] *= torch.logspace(-38, 3, GROUP)
            expected = modelled(x, grouped, fused=instruction_set != "scalar")
            assert torch.equal(matrix.multiply(x), expected), rows

    def test_the_largest_numbers_do_not_saturate(self, instruction_set: str, form: str) -> None:
        """Each of 9 groups adds 32 x 127 x the largest weight; whole numbers up to 2^24 are exact in float32."""
        for number in {"int4": (15, 0), "int8": (-128, 127), "int8_channel": (-127, 127)}[form]:
            numbers = torch.full((70, 288), number, dtype=torch.int8)
            groups = 1 if form == "int8_channel" else 9
            ones, zeros = torch.ones(70, groups).half(), torch.zeros(70, groups).half()
            with using(instruction_set):
                matrix = packed(Grouped(form, numbers, ones, zeros if form == "int4" else None))
            for rows in (1, 3, 40):
                for x in (127.0, -127.0):
                    y = matrix.multiply(torch.full((rows, 288), x))
                    assert torch.equal(y, torch.full((rows, 70), 288 * x * number))

    def test_each_input_meets_its_own_weight(self, instruction_set: str, form: str) -> None:
        """Rows with one input that is not 0: the products are the weights themselves, exactly."""
        grouped = some_groups(form, 50, 64)
        ones = torch.ones_like(grouped.scales)
        grouped = Grouped(form, grouped.numbers, ones, torch.zeros_like(ones) if form == "int4" else None)
        with using(instruction_set):
            matrix = packed(grouped)
        assert torch.equal(matrix.multiply(127 * torch.eye(64)), 127 * grouped.numbers.T.float())

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_what_is_no_number_spoils_its_own_row_only(self, instruction_set: str, form: str, value: float) -> None:
        grouped = some_groups(form, 70, 96)
        with using(instruction_set):
            matrix = packed(grouped)
        x = drawn(9, 96)
        clean = matrix.multiply(x)
        for place in (0, 31, 40):
            spoilt = x.clone()
            spoilt[4, place] = value
            y = matrix.multiply(spoilt)
            assert y[4].isnan().all()
            assert torch.equal(y[torch.arange(9) != 4], clean[torch.arange(9) != 4])

    def test_a_row_is_the_same_bits_in_any_batch(self, instruction_set: str, form: str) -> None:
        with using(instruction_set):
            matrix = packed(some_groups(form, 145, 288))
        x = drawn(255, 288)
        whole = matrix.multiply(x)
        for rows in ROWS:
            for first in (0, 1, 100, 255 - rows):
                assert torch.equal(matrix.multiply(x[first : first + rows]), whole[first : first + rows])

    def test_weights_are_read_back_as_they_were_filled(self, instruction_set: str, form: str) -> None:
        grouped = some_groups(form, 70, 160)
        with using(instruction_set):
            assert torch.equal(held(packed(grouped)), grouped.dequantized())


@pytest.mark.parametrize("form", WHOLE_FORMS)
def test_threads_do_not_change_a_bit(form: str) -> None:
    matrix = packed(some_groups(form, 1000, 288))
    x = drawn(200, 288)
    results = []
    for threads in (1, 2, 3, 7):
        with using(threads=threads):
            results += [torch.cat([matrix.multiply(x[:1]), matrix.multiply(x)])]
    assert all(torch.equal(each, results[0]) for each in results)


@pytest.mark.parametrize("form", WHOLE_FORMS)
def test_weights_take_the_memory_that_they_take_for_float32(form: str) -> None:
    grouped = some_groups(form, 480, 320)
    assert packed(grouped).bytes == packed(grouped, "float32").bytes


@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_other_weights_are_multiplied_with_rows_as_they_are(form: str) -> None:
    results = []
    for activations in ("int8", "float32"):
        matrix = Matrix(form, 70, 64, activations)
        matrix.fill(0, drawn(70, 64, seed=1))
        results.append(matrix.multiply(drawn(9, 64)))
    assert torch.equal(*results)
