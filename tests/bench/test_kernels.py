"""The kernel bench runs in small and says a figure for each matrix, form and type of K/V."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from bench import kernels
from model_runner import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels are not built here")

GIVEN = ["kernels", "--threads", "1", "--seconds", "0.01", "--rows", "1", "--parts", "products", "attention"]


def test_products_and_attention(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(sys, "argv", GIVEN)
    try:
        kernels.main()
    finally:
        torch.set_num_threads(threads)
        native.need_library().set_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    products = [line.split() for line in lines if re.match(r" +1 ", line)]
    assert [row[1] for row in products] == ["qkv", "output", "gate_up", "down"]
    # A share for torch, for each of five forms, and for three of them with activations in 8 bits.
    assert [sum(word.endswith("%") for word in row) for row in products] == [9] * 4
    kinds = [line.split(":")[0] for line in lines if "of the read bandwidth" in line]
    assert kinds == ["float32", "bfloat16"]
